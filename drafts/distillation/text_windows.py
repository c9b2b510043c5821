"""Windows of tokens straight from text files, in whatever vocabulary, without a preparatory step."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridspec.drafts.distillation.documents import read_documents, text_files

#: Characters that a token has at most, on average over a window; too few and another document follows.
CHARACTERS = 6


class TextWindows:
    """Text files and windows drawn from them; each file has the same share, whatever its size.

    Args:
        path: a file or a folder of files, as
            :func:`~hybridspec.drafts.distillation.documents.read_documents` reads them.

    Raises:
        InputError: there is no such file, or no text in it.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.files = {f.name.removesuffix(".gz"): read_documents(f) for f in text_files([path])}
        self._tokenizer, self._seed = tokenizer, seed

    def windows(self, step: int, rows: int, length: int) -> Tensor:
        """int64 token ids ``[rows, length]``; the same (seed, step) always gives the same."""
        rng = np.random.default_rng([self._seed, step])
        names = rng.choice(sorted(self.files), rows)
        return torch.tensor([self._window(self.files[name], rng, length) for name in names])

    def _window(self, documents: list[str], rng: np.random.Generator, length: int) -> list[int]:
        tokens: list[int] = []
        reach = CHARACTERS * length
        while len(tokens) < length:
            document = documents[rng.integers(len(documents))]
            start = int(rng.integers(max(1, len(document) - reach // 2)))
            part = document[start : start + reach]
            tokens += self._tokenizer(part, add_special_tokens=start == 0)["input_ids"]
        return tokens[:length]
