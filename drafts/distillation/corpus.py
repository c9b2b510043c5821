"""The text a draft learns from, as token files, and the part of it that is held out."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridspec.drafts.distillation.documents import read_documents
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.errors import InputError
from hybridspec.whole_file import write_whole

#: One document in forty is held out, by a hash of its text; of a file with fewer documents, the end of each.
HELD_OUT_ONE_IN = 40
#: Of one file, so many characters are used for each minute of training, more than it gets to see, and at least those
#: of ten minutes.
CHARACTERS_PER_MINUTE = 200_000
#: Characters of the pieces that a held-out end is cut into, each a prompt of its own.
PIECE = 1500
FEWEST_HELD_OUT = 16
#: Files with fewer tokens than so many windows are joined to one source.
FEWEST_WINDOWS = 20
JOINED = "other files"


@dataclass(frozen=True)
class Corpus:
    """Token files in a folder, and the held-out texts by source."""

    folder: Path
    tokens: dict[str, int]
    held_out: dict[str, list[str]]
    dtype: type[np.integer]

    def sampler(self, seed: int) -> WindowSampler:
        """Draws windows; a source's share is the square root of its size, so that a large one leaves room."""
        return WindowSampler(self.folder, {name: count**0.5 for name, count in self.tokens.items()}, seed, self.dtype)

    def held_out_windows(self, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> Tensor:
        """At most ``count`` windows ``[n, T + 1]`` of held-out text, T at most ``length``, spread over the sources."""
        streams = [encode(tokenizer, texts) for texts in self.held_out.values()]
        length = min(length, max(map(len, streams)) - 1)
        windows: list[list[int]] = []
        part = 0
        while len(windows) < count:
            found = [s[part * length : part * length + length + 1] for s in streams]
            found = [window for window in found if len(window) == length + 1]
            if not found:
                break
            windows += found
            part += 1
        return torch.tensor(windows[:count])

    def prompts(self, tokenizer: PreTrainedTokenizerBase, count: int, longest: int) -> list[tuple[str, list[int]]]:
        """At most ``count`` (source, beginning of a held-out text), from each source in turn."""
        prompts: list[tuple[str, list[int]]] = []
        for place in range(max(map(len, self.held_out.values()))):
            for name, texts in self.held_out.items():
                if place < len(texts) and len(prompts) < count:
                    # A character is a token at most, roughly; the rest of a long text need not be encoded.
                    tokens = tokenizer(texts[place][: 16 * longest])["input_ids"]
                    tokens = tokens[: min(longest, max(2, len(tokens) // 2))]
                    if tokens:
                        prompts.append((name, tokens))
        return prompts


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Token ids of texts one after the other, each opened by the tokenizer's own special tokens, or else closed by its
    end-of-text token.
    """
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
    closing = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for row in tokenizer(list(texts))["input_ids"]:
        ids += row if not row or row[0] in special or row[-1] in special else [*row, *closing]
    return ids


def split(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """(training documents, held-out ones)."""
    if len(documents) < HELD_OUT_ONE_IN:
        cuts = [len(d) - len(d) // HELD_OUT_ONE_IN * 2 for d in documents]
        ends = [d[cut:] for d, cut in zip(documents, cuts, strict=True)]
        pieces = [end[start : start + PIECE] for end in ends for start in range(0, len(end), PIECE)]
        return [d[:cut] for d, cut in zip(documents, cuts, strict=True)], [piece for piece in pieces if piece.strip()]
    keys = [int(hashlib.sha1(d.encode()).hexdigest(), 16) for d in documents]
    bar = sorted(keys)[len(keys) // HELD_OUT_ONE_IN - 1]
    return (
        [d for d, key in zip(documents, keys, strict=True) if key > bar],
        [d for d, key in zip(documents, keys, strict=True) if key <= bar],
    )


def identity(files: Sequence[Path]) -> list[list[str | int]]:
    """Name and size of each file: tells corpora apart without reading them."""
    return [[f.name, f.stat().st_size] for f in files]


def prepare(
    files: Sequence[Path],
    held_out: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    folder: Path,
    length: int,
    minutes: float,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Corpus:
    """Reads the corpus and writes its token files into ``folder``, or finds them there from an earlier call.

    Args:
        files: see :func:`~hybridspec.drafts.distillation.documents.text_files`.
        held_out: files to test on; without any, a part of the corpus is kept back.
        length: tokens of a training window; each source must fill one.

    Raises:
        InputError: a file is missing, broken or empty, or there is too little text.
    """
    most_characters = round(CHARACTERS_PER_MINUTE * max(10.0, minutes))
    known = {"files": identity(files), "held_out": identity(held_out), "length": length, "characters": most_characters}
    record = folder / "corpus.json"
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    if record.is_file():
        stored = json.loads(record.read_text(encoding="utf-8"))
        if stored["known"] == known:
            return Corpus(folder, stored["tokens"], stored["texts"], dtype)
    folder.mkdir(parents=True, exist_ok=True)
    ids: dict[str, list[int]] = {}
    texts: dict[str, list[str]] = {}
    for number, file in enumerate(files):
        name = file.name.removesuffix(".gz").rpartition(".")[0] or file.name
        documents = read_documents(file)
        training, kept_back = (documents, []) if held_out else split(documents)
        random.Random(0).shuffle(training)
        fresh: list[int] = []
        characters = 0
        for start in range(0, len(training), 64):
            part = [document[: most_characters - characters] for document in training[start : start + 64]]
            progress(f"reading {file.name}", (number + start / len(training)) / len(files))
            fresh += encode(tokenizer, [text for text in part if text])
            characters += sum(map(len, part))
            if characters >= most_characters:
                break
        if len(fresh) <= FEWEST_WINDOWS * length:
            name = JOINED
        ids.setdefault(name, []).extend(fresh)
        texts.setdefault(name, []).extend(kept_back)
    for file in held_out:
        name = file.name.removesuffix(".gz").rpartition(".")[0] or file.name
        texts.setdefault(name, []).extend(read_documents(file))
    if len(ids) > 1 and len(ids.get(JOINED, [])) <= length + 1:
        ids.pop(JOINED, None)
    total = sum(map(len, ids.values()))
    if max(map(len, ids.values())) <= length + 1:
        raise InputError(
            f"the corpus gives {total} tokens to train on, and one window takes {length + 1}: give more text with "
            "--corpus, or a smaller --length"
        )
    texts = {name: random.Random(0).sample(part, len(part)) for name, part in texts.items() if part}
    if max((len(encode(tokenizer, part)) for part in texts.values()), default=0) < FEWEST_HELD_OUT:
        raise InputError(
            f"less than {FEWEST_HELD_OUT} tokens are held out: give more text with --corpus, or text to test on with "
            "--heldout"
        )
    for number, (name, part) in enumerate(ids.items()):
        progress("writing token files", number / len(ids))
        np.array(part, dtype=dtype).tofile(folder / f"{name}.bin")
    tokens = {name: len(part) for name, part in ids.items()}
    write_whole(record, json.dumps({"known": known, "tokens": tokens, "texts": texts}))
    return Corpus(folder, tokens, texts, dtype)
