"""Readers of the file formats that the corpus' sources come in."""

import gzip
import io
import os
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

DICTD_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

# Type codes of R's serialisation format (R Internals, section 1.8).
R_CHARACTER, R_CHARACTER_VECTOR = 9, 16

HIDDEN_TAGS = ("script", "style", "nav", "head")
TAGS_ON_NEW_LINE = ("p", "div", "li", "h1", "h2", "h3", "h4", "tr", "br", "pre", "dt", "dd")
TAGS_WITH_BLANK_LINE = ("p", "h1", "h2", "h3", "h4", "pre", "table", "ul")


class _TextOfHtml(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text = io.StringIO()
        self._hidden = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in HIDDEN_TAGS
        self._preformatted += tag == "pre"
        if tag in TAGS_ON_NEW_LINE:
            self.text.write("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN_TAGS:
            self._hidden = max(0, self._hidden - 1)
        if tag == "pre":
            self._preformatted = max(0, self._preformatted - 1)
        if tag in TAGS_WITH_BLANK_LINE:
            self.text.write("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.write(data if self._preformatted else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """The visible text of an HTML page; preformatted blocks keep their layout."""
    parser = _TextOfHtml()
    parser.feed(page)
    without_trailing_spaces = re.sub(r"[ ]+\n", "\n", parser.text.getvalue())
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", without_trailing_spaces).strip()


def dictd_number(digits: str) -> int:
    """A number of a dictd index, written in base 64."""
    value = 0
    for digit in digits:
        value = value * 64 + DICTD_DIGITS.index(digit)
    return value


def dictd_entries(base: Path) -> Iterator[tuple[str, str]]:
    """(headword, definition) of ``base.dict.dz`` in the order of ``base.index``, without the database's own notes."""
    with gzip.open(f"{base}.dict.dz") as file:
        definitions = file.read()
    with open(f"{base}.index", encoding="utf-8") as index:
        for line in index:
            word, offset, length = line.rstrip("\n").split("\t")
            if not word.startswith("00-database"):
                start = dictd_number(offset)
                yield word, definitions[start : start + dictd_number(length)].decode("utf-8", "ignore")


def rdb_chunks(database: bytes) -> Iterator[bytes]:
    """The objects of an R lazy-load database: each is a 4-byte length followed by a zlib stream.

    Raises:
        ValueError: a chunk does not have the length that it declares.
    """
    offset = 0
    while offset < len(database):
        (length,) = struct.unpack_from(">I", database, offset)
        stream = zlib.decompressobj()
        content = stream.decompress(database[offset + 4 :])
        if len(content) != length:
            raise ValueError(f"chunk at byte {offset} has {len(content)} bytes and declares {length}")
        yield content
        offset = len(database) - len(stream.unused_data)


def rdb_strings(database: bytes) -> Iterator[list[str]]:
    """Every character vector of an R lazy-load database; objects of other types are passed over.

    Raises:
        ValueError: an object is not in R's XDR serialisation, or a vector holds something else than strings.
    """
    for content in rdb_chunks(database):
        if content[:2] != b"X\n":
            raise ValueError(f"expected R's XDR serialisation, found {content[:8]!r}")
        (version,) = struct.unpack_from(">i", content, 2)
        offset = 14
        if version >= 3:  # version 3 names the native encoding
            (name_length,) = struct.unpack_from(">i", content, offset)
            offset += 4 + name_length
        flags, count = struct.unpack_from(">Ii", content, offset)
        if flags & 0xFF == R_CHARACTER_VECTOR:
            yield _xdr_strings(content, offset + 8, count)


def _xdr_strings(content: bytes, offset: int, count: int) -> list[str]:
    strings = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", content, offset)
        if flags & 0xFF != R_CHARACTER:
            raise ValueError(f"expected a string at byte {offset}, found type {flags & 0xFF}")
        offset += 8
        length = max(0, length)  # a missing string has length -1
        strings.append(content[offset : offset + length].decode("utf-8"))
        offset += length
    return strings


def king_james_text(program: Path, data_folder: Path) -> str:
    """The whole King James Version, as Debian's ``bible`` program prints it from its compressed data.

    Raises:
        RuntimeError: the program does not run here; it is built for the machine that fetched it and needs libreadline.
    """
    command = [str(program), "-p", str(data_folder), "gen1:1-rev22:21"]
    environment = {**os.environ, "COLUMNS": "80"}  # the width of its lines
    try:
        result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        raise RuntimeError(
            f"{program} did not run: {detail.decode('utf-8', 'ignore').strip()}. It needs libreadline8 and the "
            "architecture of the package bible-kjv."
        ) from error
    return result.stdout.decode("utf-8", "ignore")
