"""Markdown documents as their tests see them: code blocks and what is to be done with each, links and anchors.

A comment in front of a block, which no reader sees, says what its language does not:

    <!-- test: slow -->                 runs under the marker ``slow``; its options are checked in every run
    <!-- test: parse, needs a GPU -->   never runs, for the reason given; its options are checked in every run
    <!-- test: continues -->            Python that goes on with the names of the block before
    <!-- test: exit 1 -->               a command that ends with this status
    <!-- test: output -->               text that the block before printed (``...`` stands for anything)
    <!-- test: file NAME -->            what is written to a file before later blocks run
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
#: Language of a block -> what its mark may say; "" is no mark.
MARKS = {
    "python": ("", "slow", "parse", "continues", "file"),
    "sh": ("", "slow", "parse", "exit"),
    "text": ("", "output", "file"),
    "toml": ("", "file"),
    "json": ("", "file"),
    "jsonl": ("", "file"),
    "math": ("",),
}
MARK = re.compile(r"<!-- test: (\w+)(?:,? (.+?))? -->")
#: Code spans that name something of this repository.
NAMED = re.compile(r"(?:\.ci|benchmarks|configs|docs|drafts|hybridspec|notebooks|tests|tuning)/[\w./-]*")


class DocumentError(Exception):
    """A document says something that is not so; names place and mistake."""


@dataclass(frozen=True)
class Block:
    """A block of code, ``place`` for messages; ``mark`` and ``argument`` as in the comment in front of it."""

    place: str
    language: str
    text: str
    mark: str = ""
    argument: str = ""


@dataclass(frozen=True)
class Document:
    """A parsed file.

    Attributes:
        anchors: as GitHub makes them of headings, and explicit ones.
        links: targets of links and images.
        spans: contents of code spans.
    """

    path: Path
    text: str = field(repr=False)
    blocks: tuple[Block, ...]
    anchors: frozenset[str]
    links: tuple[str, ...]
    spans: tuple[str, ...]


def documents() -> list[Path]:
    """Every document that is tested."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def read(path: Path, root: Path = ROOT) -> Document:
    """Raises :class:`DocumentError` for a block that nothing could be done with."""
    text = path.read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    html = " ".join(t.content for t in [*tokens, *inline] if t.type in ("html_block", "html_inline"))
    links = [str(t.attrs[key]) for t in inline for key in ("href", "src") if key in t.attrs]
    links += re.findall(r'(?:href|src|srcset)="([^"]+)"', html)
    spans = [t.content for t in inline if t.type == "code_inline"]
    anchors = {*slugs(tokens), *re.findall(r'(?:id|name)="([^"]+)"', html)}
    name = path.relative_to(root).as_posix()
    return Document(path, text, tuple(blocks(tokens, name)), frozenset(anchors), tuple(links), tuple(spans))


def blocks(tokens: list[Token], name: str) -> list[Block]:
    found = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        place = f"{name}:{token.map[0] + 1}" if token.map else name
        if token.type == "code_block":
            raise DocumentError(f"{place}: an indented block, whose language nothing tells: use a fence")
        if token.type != "fence":
            continue
        marks = MARK.findall(before.content) if before is not None and before.type == "html_block" else []
        if len(marks) > 1:
            raise DocumentError(f"{place}: more than one mark")
        mark, argument = marks[0] if marks else ("", "")
        language = token.info.strip()
        if language not in MARKS:
            raise DocumentError(f"{place}: language {language!r}: choose one of {', '.join(MARKS)}")
        if mark not in MARKS[language]:
            raise DocumentError(f"{place}: a block of {language} cannot be marked {mark!r}")
        if mark in ("parse", "file", "exit") and not argument:
            raise DocumentError(f"{place}: the mark {mark!r} needs a reason, a name or a status behind it")
        found.append(Block(place, language, token.content, mark, argument))
    return found


def slugs(tokens: list[Token]) -> list[str]:
    """Anchors of the headings: lower case, without punctuation, spaces as hyphens; repeated ones are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for token, heading in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            words = "".join(t.content for t in heading.children or () if t.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def broken_links(document: Document, root: Path = ROOT) -> list[str]:
    """Links to files and anchors that are not there, and files of this repository that are named and do not exist."""
    broken = []
    for link in document.links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (document.path.parent / name).resolve() if name else document.path
        if not path.exists():
            broken.append(f"{link}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in read(path, root).anchors:
            broken.append(f"{link}: no such anchor")
    for span in document.spans:
        if NAMED.fullmatch(span) and not (root / span).exists():
            broken.append(f"`{span}`: no such file")
    return broken
