"""What the subcommands have in common: their options, the record they leave, what they print."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.grids import Grid
from benchmarks.machine import ROOT, load_average, machine
from hybridspec.cli.consoles import table_console

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 150


def options(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        epilog=f"example: python -m benchmarks {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(benchmark=name, saved_as=name)
    shared = parser.add_argument_group("every benchmark")
    shared.add_argument("--threads", type=at_least(1), default=1)
    shared.add_argument("--seed", type=at_least(0), default=0)
    shared.add_argument("--smoke", action="store_true", help="the smallest run there is: does it work?")
    shared.add_argument("--json", type=Path, help="write the numbers to this file")
    shared.add_argument("--save", action="store_true", help=f"write them to benchmarks/results/{name}.json")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


@contextmanager
def recorded(options: argparse.Namespace, console: Console) -> Iterator[dict]:
    """A result to fill in, with machine and settings; written, with what it cost, on the way out.

    Ctrl-C inside is for whoever fills it: what is there by then is a result, too.
    """
    result: dict = {
        "benchmark": options.benchmark,
        "machine": machine(options.threads),
        "settings": {
            key: place(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in ("benchmark", "saved_as", "json", "save", "peers")
        },
        "load_average_at_start": load_average(),
    }
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()), soft_wrap=True)
    if options.save and options.smoke:
        console.print("--save is left out with --smoke: its numbers mean nothing")
    begun = time.perf_counter()
    yield result
    result["seconds"] = round(time.perf_counter() - begun, 1)
    result["load_average_at_end"] = load_average()
    saved = RESULTS / f"{options.saved_as}.json" if options.save and not options.smoke else None
    for path in filter(None, (options.json, saved)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(result), indent=1) + "\n")
        console.print(f"written: {path}")
    loads = (number if number is None else round(number, 1) for number in map(result.get, LOADS))
    console.print("load average {} at the start, {} at the end".format(*loads))


def place(path: Path) -> str:
    """A path without what it says about this machine: below the repository, or its last part."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


LOADS = ("load_average_at_start", "load_average_at_end")


def rounded(value: object, digits: int = 6) -> object:
    """The same with floats of ``digits`` significant digits: no clock is better than that."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def console() -> Console:
    return table_console(WIDTH)


def show(console: Console, grids: Sequence[Grid]) -> None:
    for grid in grids:
        console.print(grid.rich())
