"""Rows of workload files: JSON Lines, CSV, Parquet and plain text, each with the place it stands at, for messages."""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridspec.errors import InputError
from hybridspec.json_lines import json_lines

JSON_LINES, COMMAS, PARQUET, TEXT = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".pq"), (".txt",)
SUFFIXES = (*JSON_LINES, *COMMAS, *PARQUET, *TEXT)
#: Stands alone on a line between the prompts of a text file.
SEPARATOR = "---"
#: A prompt may be a long document; Python's csv module stops at 128 KiB unless told otherwise.
LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One row: ``fields`` by column, ``number`` and ``place`` (``line 3`` or ``row 3``) count from 1."""

    number: int
    place: str
    fields: dict[str, object]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by the suffix of its name; without a suffix it is JSON Lines.

    A text file holds prompts between lines that say ``---`` and nothing else; if there is no such line, every line that
    is not blank is a prompt. Its only column is ``prompt``.

    Raises:
        InputError: no such file, an unknown kind, not UTF-8, or a row that cannot be read; names file and line.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder. Give a file: {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise InputError(f"{path}: no such workload file")
    suffix = path.suffix.lower() or JSON_LINES[0]
    if suffix in PARQUET:
        yield from _parquet(path)
        return
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown kind of workload file. Known are {', '.join(SUFFIXES)}.")
    text = read_text(path)
    if suffix in TEXT:
        yield from _text(text)
    elif suffix in COMMAS:
        yield from _commas(path, text, "\t" if suffix == ".tsv" else ",")
    else:
        yield from _json_lines(path, text)


def read_text(path: Path) -> str:
    """A UTF-8 file, with or without a byte order mark.

    Raises:
        InputError: it cannot be read or is not UTF-8; names the line of the first wrong byte.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}: is UTF-16, not UTF-8 text. Convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {line}: not UTF-8 text: byte 0x{data[error.start]:02x}. Is the file, or a part of it, in "
            "another encoding? Convert it, for example: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
        ) from error


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    if path.suffix == ".json" and text.lstrip().startswith("["):
        raise InputError(f"{path}: holds one JSON array. One object per line is wanted: jq -c '.[]' OLD > NEW.jsonl")
    for number, row in json_lines(text, path):
        if not isinstance(row, dict):
            raise InputError(f'{path}, line {number}: is not an object. Write {{"prompt": "..."}}.')
        yield Row(number, f"line {number}", row)


def _commas(path: Path, text: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            begun, line = line, reader.line_num + 1
            if not cells:
                continue
            if not names:
                names = [name.strip() for name in cells]
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise InputError(f"{path}, line {begun}: two columns are called {twice!r}: rename one")
                continue
            if len(cells) != len(names):
                raise InputError(
                    f"{path}, line {begun}: has {len(cells)} fields, but the header names {len(names)} columns "
                    f"({', '.join(names)}). Quote fields that hold the delimiter or a line break."
                )
            yield Row(begun, f"line {begun}", dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, record that begins in line {line}: not valid CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs pyarrow: pip install 'hybridspec[datasets]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(number, f"row {number}", fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}") from error


def _text(text: str) -> Iterator[Row]:
    lines = re.split(r"\r\n|\n|\r", text)
    if not any(line.strip() == SEPARATOR for line in lines):
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Row(number, f"line {number}", {"prompt": line})
        return
    begun, block = 1, []
    for number, line in enumerate([*lines, SEPARATOR], 1):
        if line.strip() != SEPARATOR:
            block.append(line)
            continue
        prompt = "\n".join(block).strip("\n")
        if prompt.strip():
            yield Row(begun, f"prompt that begins in line {begun}", {"prompt": prompt})
        begun, block = number + 1, []
