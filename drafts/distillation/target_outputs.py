"""The stage of a distillation that makes outputs of the target, for the draft to learn from beside the corpus."""

import time

import torch

from hybridspec.drafts.distillation.continuations import continue_one_by_one, continue_windows
from hybridspec.drafts.distillation.corpus import Corpus
from hybridspec.drafts.distillation.draft_folder import DraftFolder
from hybridspec.drafts.distillation.output_pool import read_outputs, write_outputs
from hybridspec.drafts.distillation.settings import DistillationSettings, Progress
from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner

#: Share of the time that goes into outputs of the target to learn from, and how they are made.
OUTPUT_SHARE = 0.2
OUTPUT_ROWS = 16
OUTPUT_PROMPT = 32
OUTPUTS = "outputs.npy"
STAGE = "outputs of the target"


def make_outputs(
    target: TargetRunner, corpus: Corpus, folder: DraftFolder, settings: DistillationSettings, progress: Progress
) -> None:
    """Adds to the pool of the target's own outputs until their share of the time is used.

    Rows have ``settings.length + 1`` tokens and begin with a window of the corpus.

    Raises:
        InputError: the file of an earlier call is broken.
    """
    state, pool_file = folder.state, folder.training / OUTPUTS
    budget = 60 * settings.minutes * OUTPUT_SHARE
    length = settings.length + 1
    prompt = min(OUTPUT_PROMPT, length // 2)
    sampler = corpus.sampler(settings.seed)
    with folder.going_on(pool_file):
        pool = read_outputs(pool_file)
    while state.output_seconds < budget:
        begun = time.monotonic()
        made = sum(map(len, pool))
        share = state.output_seconds / budget
        progress(STAGE, share, f"{made} made")
        windows = sampler.batch(made, 1, OUTPUT_ROWS, prompt - 1)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + made)

        def tick(reached: int, made: int = made, share: float = share) -> None:
            progress(STAGE, share, f"{made} made, {OUTPUT_ROWS} at {reached} of {length} tokens")

        try:
            rows = continue_windows(target.model, windows, length, generator, tick)
        except UnsupportedLayerError:
            rows = continue_one_by_one(target, windows, length, generator, tick)
        pool.append(rows.numpy().astype(corpus.dtype))
        write_outputs(pool_file, pool)
        state.output_seconds += time.monotonic() - begun
        folder.save_state()
    progress(STAGE, 1.0, f"{sum(map(len, pool))} made")
