"""One step of learning a target's distributions, and the pool of its own outputs to learn from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

#: Entries of one logits tensor ``[rows, T, vocab]`` at most: half a gigabyte in fp32, and a step holds several.
LARGEST_LOGITS = 2**27


class OutputPool:
    """Rows of the target's own outputs; the same (seed, step, rank) always gives the same rows."""

    def __init__(self, paths: Sequence[Path], seed: int) -> None:
        self.rows, self.seed = np.concatenate([np.load(path) for path in paths]), seed

    def batch(self, step: int, rank: int, rows: int, length: int) -> Tensor:
        """int64 token ids ``[rows, length + 1]``."""
        rng = np.random.default_rng([self.seed, step, rank, 1])
        return torch.from_numpy(self.rows[rng.integers(0, len(self.rows), rows), : length + 1].astype(np.int64))


def rows_at_once(model: PreTrainedModel, length: int) -> int:
    """How many rows of ``length`` tokens a forward pass should take, for its logits not to fill the memory."""
    return max(1, LARGEST_LOGITS // (length * model.config.get_text_config(decoder=True).vocab_size))


def learn_from_target(
    target: PreTrainedModel, drafts: Mapping[str, PreTrainedModel], inputs: Tensor
) -> dict[str, float]:
    """Leaves on each draft the gradient of its loss over ``inputs [rows, T]``; returns losses (nats) and agreement.

    All drafts learn from one forward pass of the target, which is split by rows where the vocabulary is large.
    """
    losses: dict[str, float] = {}
    for part in inputs.split(rows_at_once(target, inputs.shape[1])):
        share = part.shape[0] / inputs.shape[0]
        with torch.no_grad():
            logits = target(input_ids=part, use_cache=False).logits
            p, best = logits.softmax(-1), logits.argmax(-1)
        for name, draft in drafts.items():
            q = draft(input_ids=part, use_cache=False).logits.log_softmax(-1)
            # Cross-entropy to the target's distribution: its gradient is that of the Kullback-Leibler divergence.
            loss = -(p * q).sum(-1).mean() * share
            loss.backward()
            agreement = (q.argmax(-1) == best).float().mean().item() * share
            for key, value in ((f"{name}_loss", loss.item()), (f"{name}_agreement", agreement)):
                losses[key] = losses.get(key, 0.0) + value
    return losses
