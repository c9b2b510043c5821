"""The stage of a distillation that trains the draft, on corpus windows and the target's own outputs in equal parts."""

from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from hybridspec.drafts.distillation.corpus import Corpus
from hybridspec.drafts.distillation.cut import shared_parts
from hybridspec.drafts.distillation.draft_folder import DraftFolder
from hybridspec.drafts.distillation.logit_distillation import LogitsPool, learn
from hybridspec.drafts.distillation.output_pool import OutputPool
from hybridspec.drafts.distillation.settings import DistillationSettings, Progress
from hybridspec.drafts.distillation.target_outputs import OUTPUT_SHARE, OUTPUTS
from hybridspec.drafts.distillation.training_kernels import CHUNK, training_kernels
from hybridspec.drafts.distillation.training_run import Processes, TrainingRun
from hybridspec.errors import HybridspecError
from hybridspec.runtime.runner import TargetRunner


def train_draft(
    target: TargetRunner,
    draft: PreTrainedModel,
    corpus: Corpus,
    folder: DraftFolder,
    settings: DistillationSettings,
    progress: Progress,
) -> TrainingRun:
    """Trains ``draft`` for what is left of its time, or until SIGINT.

    Raises:
        InputError: the file of an earlier call is broken.
        HybridspecError: the loss is no longer a number.
    """
    if not settings.train_shared:
        for parameter in shared_parts(draft):
            parameter.requires_grad_(False)
    windows = corpus.sampler(settings.seed)
    outputs = OutputPool([folder.training / OUTPUTS], settings.seed)
    pool = LogitsPool(target.model, 2 * settings.rows, settings.length, settings.seed)
    losses: dict[str, float] = {}

    def watch(row: dict) -> None:
        losses.update(loss=row["draft_loss"], agreement=row["draft_agreement"])
        text = f"loss {row['draft_loss']:.3f}, agreement {row['draft_agreement']:.0%}"
        progress("training", row["progress"], f"{text}, {row['tokens_per_second']} tokens/s")

    def draw(step: int) -> torch.Tensor:
        parts = [source.batch(step, 0, settings.rows, settings.length) for source in (windows, outputs)]
        return torch.cat(parts)[:, :-1]

    def train_step(step: int, share: float) -> tuple[dict[str, float], int]:
        rows = 2 * settings.rows
        found = learn({"draft": draft}, pool.step(step, lambda: draw(step)), rows)
        if not np.isfinite(found["draft_loss"]):
            raise HybridspecError(
                f"the loss is {found['draft_loss']} in step {step}: training went astray. Use a smaller --rate "
                "and another --out."
            )
        return found, rows * settings.length

    target.model.requires_grad_(False)
    draft.train()
    with folder.going_on(folder.training / "checkpoint.pt"):
        run = TrainingRun(
            folder.training,
            {"draft": draft},
            settings.minutes * (1 - OUTPUT_SHARE),
            Processes(0, 1),
            save_every=30.0,
            muon_lr=0.02 * settings.rate,
            adam_lr=4e-3 * settings.rate,
            watch=watch,
        )
    with training_kernels() if settings.length % CHUNK == 0 else nullcontext():
        run.run(train_step)
    draft.eval()
    folder.state.fresh_tokens += pool.fresh_tokens
    folder.state.losses = losses or folder.state.losses
    folder.save_state()
    return run
