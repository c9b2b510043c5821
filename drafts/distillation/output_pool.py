"""The target's own outputs as rows of token ids in a ``.npy`` file, which grows from call to call."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class OutputPool:
    """Rows of the target's own outputs; the same (seed, step, rank) always gives the same rows."""

    def __init__(self, paths: Sequence[Path], seed: int) -> None:
        self.rows, self.seed = np.concatenate([np.load(path) for path in paths]), seed

    def batch(self, step: int, rank: int, rows: int, length: int) -> Tensor:
        """int64 token ids ``[rows, length + 1]``."""
        rng = np.random.default_rng([self.seed, step, rank, 1])
        return torch.from_numpy(self.rows[rng.integers(0, len(self.rows), rows), : length + 1].astype(np.int64))


def read_outputs(path: Path) -> list[np.ndarray]:
    """The rows that are in the file, as one part; no part without a file."""
    return [np.load(path)] if path.is_file() else []


def write_outputs(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Replaces the file in one move by all parts ``[rows, length]`` one below the other."""
    partial = path.with_suffix(".partial.npy")
    np.save(partial, np.concatenate(parts))
    partial.replace(path)
