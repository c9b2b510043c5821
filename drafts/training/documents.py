"""Windows of tokens straight from text files, in whatever vocabulary, without a preparatory step."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridspec.drafts.training.data import read_documents
from hybridspec.errors import InputError

SUFFIXES = (".txt", ".txt.gz")
#: Characters that a token has at most, on average over a window; too few and another document follows.
CHARACTERS = 6


class Documents:
    """Text files and windows drawn from them; each file has the same share, whatever its size.

    Args:
        path: a ``.txt`` or ``.txt.gz`` file, or a folder of them; ``<|endoftext|>`` lines separate documents.

    Raises:
        InputError: there is no such file, or no text in it.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder. Give text files as the corpus.")
        files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.name.endswith(SUFFIXES))
        if not files or not all(f.name.endswith(SUFFIXES) for f in files):
            raise InputError(f"{path}: no {' or '.join(SUFFIXES)} file. Give text files as the corpus.")
        self.files = {f.name.removesuffix(".gz"): _documents(f) for f in files}
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


def _documents(path: Path) -> list[str]:
    try:
        documents = read_documents(path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if not documents:
        raise InputError(f"{path}: no text in it")
    return documents
