"""Options and loading that several subcommands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hybridspec.drafts.same_architecture import SameArchitectureDraft
    from hybridspec.runner import TargetRunner

TargetOption = Annotated[
    Path | None,
    typer.Option("--target", help="Checkpoint folder of the target. Default: the embedded one.", show_default=False),
]
DraftOption = Annotated[
    Path | None,
    typer.Option("--draft", help="Checkpoint folder of the draft. Default: the embedded one.", show_default=False),
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


def load_target(target: Path | None, threads: int, rollback: str) -> "TargetRunner":
    """The target at a path, or the embedded one."""
    import torch

    from hybridspec import embedded
    from hybridspec.runner import TargetRunner

    torch.set_num_threads(threads)
    return TargetRunner.from_pretrained(target or embedded.TARGET, rollback=rollback)


def check_writable(path: Path) -> None:
    """Before long work: raises :class:`InputError` if ``path`` cannot be written afterwards."""
    import os

    from hybridspec.errors import InputError

    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written: is {folder} a folder that you may write to?")


def load_pair(
    target: Path | None, draft: Path | None, threads: int, rollback: str
) -> "tuple[TargetRunner, SameArchitectureDraft]":
    """Loads and checks target and draft; without paths, the embedded pair."""
    import torch

    from hybridspec import embedded
    from hybridspec.drafts.same_architecture import SameArchitectureDraft
    from hybridspec.errors import InputError
    from hybridspec.runner import TargetRunner

    if target is not None and draft is None:
        raise InputError("--target needs --draft: the embedded draft fits the embedded target only")
    torch.set_num_threads(threads)
    runner = TargetRunner.from_pretrained(target or embedded.TARGET, rollback=rollback)
    small = SameArchitectureDraft(
        TargetRunner.from_pretrained(draft or embedded.DRAFTS[embedded.DEFAULT_DRAFT], rollback=rollback)
    )
    small.check_pair(runner)
    return runner, small
