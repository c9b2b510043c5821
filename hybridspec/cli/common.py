"""Options and loading that several subcommands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from hybridspec.runtime.runner import TargetRunner

TargetOption = Annotated[
    Path | None,
    typer.Option("--target", help="Checkpoint folder of the target. Default: the embedded one.", show_default=False),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Sample from the k likeliest tokens only.")]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Sample from the smallest set with this probability.")
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads; small models run best on one.")]
RollbackOption = Annotated[
    str,
    typer.Option(
        help="How rejected tokens are taken back: tape, slots, recompute, or auto (tape where known, else recompute)."
    ),
]
NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Go on although hybridspec check finds errors in the files.")
]

CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Run target and draft compiled (on the CPU by a C++ compiler): a first pass of each block length takes "
        "a minute or more; torch keeps what the compiler made on disk, for the next run.",
    ),
]

PackedOption = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="Keep a second copy of the larger weights, laid out for passes over a few tokens: in float32 on a CPU, "
        "models of a thousand channels and more verify up to twice as fast. Takes the memory of the weights again.",
    ),
]

WorkloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        help="Embedded name; JSON Lines, CSV, Parquet or text file; folder; or data set of the local cache. Options "
        "follow a colon, with commas between: faq.csv:column=question,seed=1. They are column, chat, prompts, seed, "
        "max_new_tokens, temperature, name, split, subset, skip_unusable, number_rows. Repeat for several. Default: "
        "all embedded ones.",
    ),
]


def check_first(target: Path | None, drafts: Sequence[str], no_check: bool) -> None:
    """The quick part of ``hybridspec check`` on checkpoints that a user gave; ``drafts`` are strategies or folders.

    Raises:
        CheckFailedError: it found errors; names them.
    """
    from hybridspec.checker.check import check
    from hybridspec.errors import CheckFailedError

    if no_check or target is None:
        return
    folders = [Path(spec.removeprefix("same-architecture:").removeprefix("path=")) for spec in drafts]
    for draft in [folder for folder in folders if folder.is_dir()] or [None]:
        errors = check(target, draft, quick=True).errors
        if errors:
            lines = [f"  {error.code} {error.subject}: {error.seen} {error.action}" for error in errors]
            found = f"the check found {len(errors)} error{'s' * (len(errors) != 1)}:"
            names = " ".join(str(path) for path in (target, draft) if path)
            hint = f"hybridspec check {names} tells more; --no-check goes on regardless."
            raise CheckFailedError("\n".join([found, *lines, hint]))


def load_target(path: Path | None, options: LoadOptions, threads: int) -> "TargetRunner":
    """The target in a folder, or the embedded one, for so many CPU threads."""
    import torch

    from hybridspec import embedded
    from hybridspec.runtime.runner import TargetRunner

    torch.set_num_threads(threads)
    return TargetRunner.from_pretrained(path or embedded.TARGET, options=options)


def check_writable(path: Path) -> None:
    """Before long work: raises :class:`InputError` if ``path`` cannot be written afterwards."""
    import os

    from hybridspec.errors import InputError

    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written: is {folder} a folder that you may write to?")
