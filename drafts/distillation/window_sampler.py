"""Training windows drawn from files of token ids."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class WindowSampler:
    """Draws windows of tokens by domain share; the same (seed, step, rank) always gives the same batch."""

    def __init__(
        self, folder: Path, mixture: dict[str, float], seed: int = 0, dtype: type[np.integer] = np.uint16
    ) -> None:
        missing = [d for d in mixture if not (folder / f"{d}.bin").is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: no token file for {', '.join(missing)}. Run the data step first.")
        self.domains = list(mixture)
        self.tokens = [np.memmap(folder / f"{d}.bin", dtype, "r") for d in self.domains]
        shares = np.array([mixture[d] for d in self.domains])
        self.shares = shares / shares.sum()
        self.seed = seed

    def batch(self, step: int, rank: int, rows: int, length: int) -> Tensor:
        """int64 token ids ``[rows, length + 1]``: inputs are ``[:, :-1]``, targets ``[:, 1:]``."""
        rng = np.random.default_rng([self.seed, step, rank])
        windows = []
        for domain in rng.choice(len(self.domains), rows, p=self.shares):
            tokens = self.tokens[domain]
            # The window that ends with the file was never drawn; a file of one window has no other.
            start = rng.integers(0, max(1, len(tokens) - length - 1))
            windows.append(tokens[start : start + length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(windows))
