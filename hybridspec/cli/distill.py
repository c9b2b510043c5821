"""``hybridspec distill``: a small draft for a target whose family has none."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import RollbackOption, TargetOption, ThreadsOption, load_target
from hybridspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Makes a small draft of the target's own architecture.

The draft is a few of the target's layers in the target's pattern, with its embeddings, norm and head. It learns the
target's distributions over the corpus and over the target's own outputs, and is measured on held-out prompts by real
speculative decoding, before and after. OUT becomes an ordinary checkpoint with distillation.json, its provenance.

Interrupt at will: what was trained is saved, and the same command goes on. More --minutes train a finished draft
further. Exit status 130: interrupted. 2: bad input, or a target that no draft can be cut from.

Example: hybridspec distill --target ./Bamba-9B --corpus texts/ --layers 4 --minutes 60 --out bamba-draft
"""


def distill(
    corpus: Annotated[
        list[Path],
        typer.Option(
            "--corpus",
            "-c",
            help="Text file, .gz, JSON Lines (text or prompt), or folder of these; repeat for several.",
        ),
    ],
    target: TargetOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the draft.")] = Path("hybridspec-draft"),
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the draft. Default: a twelfth of the target's.")
    ] = None,
    keep_layers: Annotated[
        str | None, typer.Option(help="Which of the target's layers instead, from 0, as in 0,3,20,23.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for outputs and training, over all sittings.")] = 10.0,
    heldout: Annotated[
        list[Path] | None,
        typer.Option("--heldout", help="Text to test on, as --corpus. Default: a part of the corpus is kept back."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Draft length of the held-out measurement.")] = 4,
    rows: Annotated[
        int, typer.Option(min=1, help="Corpus windows in a step; as many of the target's outputs come with them.")
    ] = 2,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a window.")] = 256,
    rate: Annotated[float, typer.Option(help="Factor on the learning rates.")] = 1.0,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to decode.")] = 14,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of windows and outputs.")] = 0,
    threads: ThreadsOption = 1,
    rollback: RollbackOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the provenance as JSON.")] = False,
) -> None:
    from rich.console import Console
    from rich.progress import TaskID

    from hybridspec import embedded
    from hybridspec.cli.consoles import progress_bar, table_console
    from hybridspec.drafts.distillation.distill import distill as run
    from hybridspec.drafts.distillation.documents import text_files
    from hybridspec.drafts.distillation.provenance import PROVENANCE
    from hybridspec.drafts.distillation.settings import DistillationSettings

    settings = DistillationSettings(
        layers=layers,
        keep_layers=None if keep_layers is None else _numbers(keep_layers),
        minutes=minutes,
        k=k,
        rows=rows,
        length=length,
        seed=seed,
        rate=rate,
        prompts=prompts,
    )
    # Before a large target is loaded.
    text_files([*corpus, *(heldout or ())])
    console = Console(stderr=True)
    with console.status("loading the target"):
        runner = load_target(target, LoadOptions(rollback=rollback), threads)
    try:
        with progress_bar(console, 22, 20) as bar:
            tasks: dict[str, TaskID] = {}

            def show(stage: str, share: float, detail: str) -> None:
                if stage not in tasks:
                    for task in tasks.values():
                        bar.update(task, completed=1.0)
                    tasks[stage] = bar.add_task(stage, total=1.0, detail="")
                bar.update(tasks[stage], completed=share, detail=detail)

            provenance = run(runner, corpus, out, settings, heldout or (), show)
            for task in tasks.values():
                bar.update(task, completed=1.0 if provenance["complete"] else None)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was done is in {out}; the same command goes on from there.", soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        json.dump(provenance, sys.stdout, indent=2)
        sys.stdout.write("\n")
    if not provenance["complete"]:
        console.print(
            f"Interrupted after {provenance['steps']} steps. The draft so far is in {out}, not yet measured; the same "
            "command goes on from there.",
            soft_wrap=True,
        )
        raise typer.Exit(130)
    if not as_json:
        output = table_console(120)
        _summary(output, provenance)
        output.print(
            f"Draft: {out} (provenance: {out / PROVENANCE})\n"
            f"Next: hybridspec tune --target {target or embedded.TARGET} --draft {out}",
            soft_wrap=True,
        )


def _numbers(text: str) -> tuple[int, ...]:
    from hybridspec.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--keep-layers {text}: give layer numbers with commas between, as in 0,3") from error


def _summary(console: "Console", provenance: dict) -> None:
    from rich.table import Table

    kept, of = provenance["kept_layers"], provenance["target"]["layers"]
    table = Table(
        title=f"Layers {', '.join(map(str, kept))} of {of}, on {provenance['held_out']['after']['prompts']} held-out "
        f"prompts, K = {provenance['settings']['k']}",
        title_justify="left",
    )
    for heading in ("", "acceptance rate", "acceptance length", "same argmax", "overlap"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, label in (("before", "cut"), ("after", "trained")):
        row = provenance["held_out"][name]
        rate = row["acceptance_rate"]
        table.add_row(
            label,
            "-" if rate is None else f"{rate:.1%}",
            f"{row['acceptance_length']:.2f}",
            f"{row['agreement']:.1%}",
            f"{row['overlap']:.1%}",
        )
    console.print(table)
