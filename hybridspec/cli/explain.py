"""``hybridspec explain``: what a finding of ``hybridspec check`` means, in full."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

HELP = """Explains a code of hybridspec check: what was seen, why it matters, what to do. Without a code, lists all.

Example: hybridspec explain HS101
"""


def explain(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="For example HS101.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from rich.markup import escape

    from hybridspec.checkpoints.codes import CODES
    from hybridspec.checkpoints.codes import explain as find
    from hybridspec.cli.consoles import table_console

    chosen = CODES if code is None else {code.strip().upper(): find(code)}
    if as_json:
        json.dump({name: dataclasses.asdict(entry) for name, entry in chosen.items()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = table_console(120)
    for name, entry in chosen.items():
        if code is None:
            console.print(f"[bold]{name}[/bold] {entry.severity:8}{escape(entry.title)}", soft_wrap=True)
            continue
        console.print(f"[bold]{name}: {escape(entry.title)}[/bold] ({entry.severity})\n")
        console.print(escape(entry.long) + "\n")
        console.print(f"[bold]Why it matters:[/bold] {escape(entry.why)}")
        console.print(f"[bold]What to do:[/bold] {escape(entry.action)}")
        if entry.unreadable:
            console.print("Exit status of hybridspec check: 2, for a file could not be read.")
