"""Writes results/README.md from the JSON files beside it: the tables that a run prints, and where it ran."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.__main__ import COMMANDS

HEAD = """# Results

Made by `python -m benchmarks table` from the JSON files in this folder; each says how it was made.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks table",
        description=__doc__,
        epilog="example: python -m benchmarks table --results benchmarks/results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=command.RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--check", action="store_true", help="only say whether README.md is what the files give")
    chosen = parser.parse_args(arguments)
    try:
        text = page(chosen.results)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path = chosen.results / "README.md"
    if not chosen.check:
        path.write_text(text)
        print(f"written: {path}")
    elif not path.exists() or path.read_text() != text:
        print(f"{path} is not what its JSON files give: run python -m benchmarks table", file=sys.stderr)
        return 1
    return 0


def page(folder: Path) -> str:
    """Raises ValueError where there is no result, or one that cannot be read; names the file."""
    found = sorted(folder.glob("*.json"))
    if not found:
        raise ValueError(f"{folder} holds no results: a benchmark with --save writes one")
    results = [read(path) for path in found]
    order = list(COMMANDS)
    results.sort(key=lambda result: order.index(result["benchmark"]))
    return "\n".join([HEAD, *map(section, results)])


def read(path: Path) -> dict:
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from error
    if not isinstance(result, dict) or result.get("benchmark") not in COMMANDS:
        raise ValueError(f"{path}: its field 'benchmark' names none of {', '.join(COMMANDS)}")
    return result | {"file": path.name}


def section(result: dict) -> str:
    module = importlib.import_module(f"benchmarks.{result['benchmark'].replace('-', '_')}")
    tables = [grid.markdown() for grid in module.tables(result)]
    return "\n\n".join([f"## {result['benchmark']} ([{result['file']}]({result['file']}))", where(result), *tables, ""])


def where(result: dict) -> str:
    machine = result["machine"]
    loads = (f"{load:.1f}" if load is not None else "unknown" for load in map(result.get, command.LOADS))
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['cores_of_this_process']} of them used, "
        f"{machine['threads']} thread(s), Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, hybridspec {machine['hybridspec']} at commit {machine['commit']}, "
        "load average {} at the start and {} at the end, ".format(*loads)
        + f"{result['seconds']:.0f} s."
    )
