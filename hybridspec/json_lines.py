"""JSON Lines with errors that name file and line."""

import json
from collections.abc import Iterator
from pathlib import Path

from hybridspec.errors import InputError


def json_lines(text: str, path: Path) -> Iterator[tuple[int, object]]:
    """(line number, value) of each line of ``text`` that is not blank; ``path`` is what errors call it.

    Raises:
        InputError: a line is no JSON.
    """
    # Not splitlines: JSON strings may hold other line separators as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number}: not valid JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: cannot be read as JSON: {error}") from error
