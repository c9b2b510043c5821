"""Workloads: named sets of prompts, from JSON Lines files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridspec.embedded import workload_files
from hybridspec.errors import InputError
from hybridspec.json_lines import json_lines


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``id`` names it in results."""

    id: str
    text: str


@dataclass(frozen=True)
class Workload:
    """A set of prompts that one draft length is chosen for."""

    name: str
    prompts: tuple[Prompt, ...]


def load_workload(path: Path) -> Workload:
    """Reads ``{"prompt": ...}`` objects, one per line; ``id`` is optional, other fields are ignored.

    Raises:
        InputError: no such file, no prompts in it, or a bad line; names file, line and field.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder. Give a JSON Lines file.")
    if not path.is_file():
        raise InputError(f"{path}: no such workload file")
    prompts = []
    try:
        # A byte order mark is Windows' habit.
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    for number, row in json_lines(content, path):
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise InputError(f'{path}, line {number}: field "prompt" is missing, empty or not a string')
        prompts.append(Prompt(str(row.get("id", f"{path.stem}-{number}")), text))
    if not prompts:
        raise InputError(f'{path}: no prompts in it. Give one {{"prompt": "..."}} object per line.')
    return Workload(path.stem, tuple(prompts))


def find_workload(name: str) -> Workload:
    """An embedded workload by name, or a JSON Lines file by path."""
    embedded = workload_files()
    if name in embedded:
        return load_workload(embedded[name])
    if Path(name).suffix or Path(name).exists():
        return load_workload(Path(name))
    raise InputError(f"no embedded workload {name!r}: choose {', '.join(embedded)}, or give a JSON Lines file")


def choose_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts spread evenly over the file, or all of them."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]
