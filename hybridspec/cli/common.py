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
NoCheckOption = Annotated[
    bool, typer.Option("--no-check", help="Go on although hybridspec check finds errors in the files.")
]


def check_first(target: Path | None, draft: Path | None, no_check: bool) -> None:
    """The quick part of ``hybridspec check`` on checkpoints that a user gave.

    Raises:
        CheckFailedError: it found errors; names them.
    """
    from hybridspec.checker.check import check
    from hybridspec.errors import CheckFailedError

    if no_check or target is None or draft is None:
        return
    errors = check(target, draft, quick=True).errors
    if errors:
        lines = [f"  {error.code} {error.subject}: {error.seen} {error.action}" for error in errors]
        found = f"the check found {len(errors)} error{'s' * (len(errors) != 1)}:"
        hint = f"hybridspec check {target} {draft} tells more; --no-check goes on regardless."
        raise CheckFailedError("\n".join([found, *lines, hint]))


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
