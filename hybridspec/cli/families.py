"""``hybridspec families``: which model types run, by which rollback modes, on the installed transformers."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from hybridspec.runtime.families import Family

HELP = """Lists the hybrid model types of the installed transformers: their mixers, the rollback modes that can run
them, and what to know about each.

Both are read from the code of transformers and of hybridspec; when a model is
loaded, a self-test has the last word. Exit status 2: nothing matches FILTER.

Example: hybridspec families jamba
"""
MODES = """[bold]modes[/bold]: tape rebuilds the state after any number of tokens in closed form, slots keeps a state \
for each pending token, recompute copies everything and feeds kept tokens again."""


def families(
    words: Annotated[
        str | None, typer.Argument(metavar="FILTER", help="Part of a model type or mixer.", show_default=False)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the causal models without a recurrence (dense ones).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console
    from transformers import __version__

    from hybridspec.cli.consoles import table_console
    from hybridspec.runtime.families import families as known_families
    from hybridspec.runtime.families import matching

    with Console(stderr=True).status("reading transformers' modeling files"):
        # Someone who asks for a dense type by name wants to see it.
        found = known_families(dense=everything or words is not None)
    if words is not None:
        found = matching(found, words)
    if as_json:
        rows = [dataclasses.asdict(family) for family in found]
        json.dump({"transformers": __version__, "families": rows}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = table_console(120)
    _print_table(console, found, __version__)
    console.print(MODES)
    if words is None and not everything:
        console.print("Dense models (attention only) run too: --all lists them.")


def _print_table(console: "Console", found: "list[Family]", version: str) -> None:
    from rich.table import Table

    table = Table()
    for heading in ("model type", "mixers", "modes", f"transformers {version}", "notes"):
        # A model type is for copying: never cut it.
        table.add_column(heading, no_wrap=heading == "model type", overflow="fold")
    for family in found:
        table.add_row(
            family.model_type,
            ", ".join(family.mixers) or "-",
            ", ".join(family.modes) or "-",
            f"no, {family.since} has it" if family.since else "yes",
            ", ".join(note.name for note in family.notes),
        )
    console.print(table)
    texts: dict[tuple[str, str], list[str]] = {}
    for family in found:
        for note in family.notes:
            texts.setdefault((note.name, note.text), []).append(family.model_type)
    shared = {name for name, _ in texts if sum(name == other for other, _ in texts) > 1}
    for (name, text), types in sorted(texts.items()):
        which = f" ({', '.join(types)})" if name in shared else ""
        console.print(f"[bold]{name}[/bold]{which}: {text}")
    if inside := [f"{outer} ({family.model_type})" for family in found for outer in family.inside]:
        console.print(f"[bold]multimodal types[/bold], with their text part: {', '.join(inside)}")
