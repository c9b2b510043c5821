"""Documents of text files: plain, compressed, or JSON Lines."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from hybridspec.errors import InputError
from hybridspec.json_lines import json_lines

#: Line between two documents of a text file.
END_OF_TEXT = "<|endoftext|>"
#: What is read of a folder, as it is or compressed with gzip.
SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl")
#: Fields of a JSON Lines row that hold its text, best first.
TEXT_FIELDS = ("text", "prompt")


def text_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and those of folders that look like text, folders below included.

    Raises:
        InputError: a path does not exist, or a folder holds no such file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [
                f for f in sorted(path.rglob("*")) if f.is_file() and f.name.removesuffix(".gz").endswith(SUFFIXES)
            ]
            if not inside:
                raise InputError(f"{path}: no text in this folder ({', '.join(SUFFIXES)}, each also with .gz)")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return list(dict.fromkeys(files))


def read_documents(path: Path) -> list[str]:
    """The documents of one file that are not blank.

    JSON Lines (``.jsonl``) give one for each row, its ``text`` or ``prompt``; other files are split at lines that say
    ``<|endoftext|>``. ``.gz`` is unpacked.

    Raises:
        InputError: the file is not readable, not gzip, not UTF-8, not JSON Lines, or has no text.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: not a whole gzip file: {error}. Copy it again.") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        documents = [_text_of(row, path, number) for number, row in json_lines(text, path)]
    else:
        documents = [document.strip("\n") for document in text.split(f"\n{END_OF_TEXT}\n")]
    documents = [document for document in documents if document.strip() and document.strip() != END_OF_TEXT]
    if not documents:
        raise InputError(f"{path}: no text in it")
    return documents


def _text_of(row: object, path: Path, number: int) -> str:
    texts = [row.get(field) for field in TEXT_FIELDS] if isinstance(row, dict) else []
    found = next((text for text in texts if isinstance(text, str)), None)
    if found is None:
        raise InputError(f"{path}, line {number}: neither field {' nor '.join(map(repr, TEXT_FIELDS))} holds a string")
    return found
