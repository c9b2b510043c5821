"""Where a draft comes from, and how good it is: what ``distillation.json`` beside its weights says."""

import dataclasses
import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hybridspec.drafts.distillation.corpus import Corpus
from hybridspec.drafts.distillation.draft_folder import DraftFolder, write_json
from hybridspec.drafts.distillation.settings import DistillationSettings
from hybridspec.drafts.distillation.training_run import TrainingRun
from hybridspec.runtime.runner import TargetRunner

PROVENANCE = "distillation.json"


@dataclass(frozen=True)
class Provenance:
    """What a draft is made of; ``files`` are those of the corpus."""

    target: TargetRunner
    draft: PreTrainedModel
    folder: DraftFolder
    settings: DistillationSettings
    files: Sequence[Path]
    corpus: Corpus

    def write(self, run: TrainingRun, after: dict | None) -> dict:
        """Writes ``distillation.json`` and returns what it holds.

        Args:
            run: the training so far.
            after: held-out figures of the trained draft; None while it is not complete.
        """
        state = self.folder.state
        provenance = {
            "schema": 1,
            "complete": after is not None,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "target": {
                "name": self.target.name,
                "path": str(self.target.path) if self.target.path else None,
                "model_type": self.target.config.model_type,
                "layers": self.target.config.num_hidden_layers,
                "sha256": state.known["target"],
            },
            "kept_layers": state.known["kept_layers"],
            "parameters": sum(p.numel() for p in self.draft.parameters()),
            "trained_parameters": sum(p.numel() for p in self.draft.parameters() if p.requires_grad),
            "settings": dataclasses.asdict(self.settings),
            "corpus": {
                "files": list(map(str, self.files)),
                "tokens": self.corpus.tokens,
                "held_out_texts": {name: len(texts) for name, texts in self.corpus.held_out.items()},
            },
            "steps": run.step,
            "tokens_trained": run.tokens,
            "different_tokens": state.fresh_tokens,
            "minutes": {
                "training": round(run.trained_seconds / 60, 2),
                "outputs": round(state.output_seconds / 60, 2),
            },
            "losses": state.losses,
            "held_out": {"before": state.held_out["before"]["figures"], "after": after},
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("hybridspec", "torch", "transformers")},
        }
        write_json(self.folder.path / PROVENANCE, provenance)
        return provenance


def fingerprint(runner: TargetRunner) -> str:
    """SHA-256 over config and weights: the same for a copy of the checkpoint elsewhere."""
    digest = hashlib.sha256()
    if runner.path is None:
        for name, tensor in runner.model.state_dict().items():
            digest.update(name.encode() + tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
    files = sorted(runner.path.glob("*.safetensors")) or sorted(runner.path.glob("pytorch_model*.bin"))
    for path in [runner.path / "config.json", *files]:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while part := file.read(2**24):
                digest.update(part)
    return digest.hexdigest()
