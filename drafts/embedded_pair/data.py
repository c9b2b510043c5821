"""Turns a text corpus into a tokenizer and one token file per domain, and draws training windows from them.

A corpus is a folder of ``<domain>.txt.gz`` (or ``.txt``) files whose documents are separated by ``<|endoftext|>``
lines.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hybridspec.drafts.distillation.documents import read_documents
from hybridspec.drafts.embedded_pair.tasks import task_documents
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer, train_tokenizer

#: Share of training windows drawn from each domain.
MIXTURE = {
    "code": 0.19,
    "docs": 0.12,
    "prose": 0.15,
    "json": 0.12,
    "logs": 0.11,
    "chat": 0.15,
    "math": 0.08,
    "tasks": 0.08,
}


def is_permissive(document: str) -> bool:
    """False for the MPL-licensed tqdm sources that a corpus built from site-packages may contain."""
    return document.count("tqdm") < 3


def read_corpus(folder: Path) -> dict[str, list[str]]:
    """Documents by domain.

    Raises:
        FileNotFoundError: no ``*.txt`` or ``*.txt.gz`` file lies in ``folder``.
    """
    files = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.gz")])
    if not files:
        raise FileNotFoundError(f"{folder}: no <domain>.txt or <domain>.txt.gz file. Give the corpus folder.")
    return {f.name.split(".")[0]: [d for d in read_documents(f) if is_permissive(d)] for f in files}


def balanced_sample(corpus: dict[str, list[str]], characters_each: int = 2_500_000) -> Iterator[str]:
    for domain in sorted(corpus):
        documents, taken = random.Random(0).sample(corpus[domain], len(corpus[domain])), 0
        for document in documents:
            if taken > characters_each:
                break
            yield document[:20_000]
            taken += len(document[:20_000])


def prepare(
    corpus_folder: Path,
    out: Path,
    vocab_size: int = 2048,
    characters_each: int = 16_000_000,
    tokenizer_folder: Path | None = None,
) -> None:
    """Writes ``out/tokenizer/`` and ``out/<domain>.bin`` (uint16 token ids, each document opened by
    ``<|endoftext|>``). A tokenizer is trained unless ``tokenizer_folder`` holds one.
    """
    corpus = read_corpus(corpus_folder)
    corpus["tasks"] = task_documents(corpus["code"], corpus["docs"] + corpus["prose"])
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer_folder is None:
        tokenizer = train_tokenizer(balanced_sample(corpus), vocab_size)
    else:
        tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.save_pretrained(out / "tokenizer")
    tokenizer = load_tokenizer(out / "tokenizer")
    for domain, documents in sorted(corpus.items()):
        documents = random.Random(1).sample(documents, len(documents))
        ids: list[int] = []
        characters = 0
        for start in range(0, len(documents), 256):
            batch = documents[start : start + 256]
            for row in tokenizer(batch)["input_ids"]:
                ids += row
            characters += sum(map(len, batch))
            if characters > characters_each:
                break
        np.array(ids, dtype=np.uint16).tofile(out / f"{domain}.bin")
        print(f"{domain:6s} {len(ids):>9,} tokens  {characters / len(ids):.2f} characters per token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to keep, to train a saved model further")
    arguments = parser.parse_args()
    prepare(arguments.corpus, arguments.out, arguments.vocab_size, tokenizer_folder=arguments.tokenizer)


if __name__ == "__main__":
    main()
