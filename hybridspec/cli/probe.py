"""``hybridspec probe``: can this target draft for itself with its full-attention layers?"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import RollbackOption, ThreadsOption, load_target
from hybridspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from hybridspec.drafts.full_attention.viability import Viability

HELP = """Measures what is left of TARGET when only its full-attention layers run, as the full-attention draft has it.

The number that counts is the perplexity of the reduced model over that of the whole one, on the target's own keys and
values: under 5 drafting can pay, over 20 it cannot. Without arguments it probes the embedded target, with its bridges,
on the embedded workloads. Exit status 1: it cannot pay.

Example: hybridspec probe ./Qwen3.5-0.8B --bridges ./bridges --text sample.txt
"""


def probe(
    target: Annotated[
        Path | None,
        typer.Argument(help="Checkpoint folder of the target. Default: the embedded one.", show_default=False),
    ] = None,
    bridges: Annotated[
        str,
        typer.Option(help="Folder of trained bridges; none: skip the layers; auto: the embedded ones where they fit."),
    ] = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text file to predict; repeat for several. Default: the embedded workloads."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of each text.")] = 1024,
    threads: ThreadsOption = 1,
    rollback: RollbackOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console
    from rich.progress import track

    from hybridspec.drafts.full_attention.strategy import FullAttentionDraft
    from hybridspec.drafts.full_attention.viability import TOGETHER, probe_each

    texts = {path.name: [read_text(path)] for path in text or ()} or _workloads()
    runner = load_target(target, LoadOptions(rollback=rollback), threads)
    draft = FullAttentionDraft.create(runner, bridges)
    encoded = {name: map(runner.encode, parts) for name, parts in texts.items()}
    bar = partial(track, description="probing", console=Console(stderr=True), transient=True)
    rows = probe_each(draft.reduced, encoded, tokens, bar)
    verdict = rows[TOGETHER].verdict
    if as_json:
        answer = {"target": runner.name, "draft": draft.name, "verdict": verdict}
        json.dump(answer | {"texts": {name: as_dict(row) for name, row in rows.items()}}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(rows, runner.name, draft.name)
    if verdict == "cannot pay":
        raise typer.Exit(1)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        InputError: there is none, or it is not UTF-8.
    """
    from hybridspec.errors import InputError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _workloads() -> dict[str, list[str]]:
    from hybridspec.embedded import workload_files
    from hybridspec.tuning.workloads.sources import load_workload

    return {name: [p.text for p in load_workload(path).prompts] for name, path in workload_files().items()}


def as_dict(row: "Viability") -> dict[str, float | str]:
    """All numbers of a row, those computed from others too."""
    from dataclasses import asdict

    return asdict(row) | {"ratio": row.ratio, "alone_ratio": row.alone_ratio, "verdict": row.verdict}


def show(rows: "dict[str, Viability]", target: str, draft: str) -> None:
    from rich.table import Table

    from hybridspec.cli.consoles import table_console

    console = table_console(120)
    table = Table(title=f"{target}: {draft}")
    for heading in ("text", "tokens", "perplexity", "reduced", "ratio", "ratio alone", "agreement", "acceptance"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for name, row in rows.items():
        perplexities = [f"{x:,.3g}" for x in (row.perplexity, row.reduced_perplexity, row.ratio, row.alone_ratio)]
        table.add_row(name, f"{row.tokens:,}", *perplexities, f"{row.agreement:.0%}", f"{row.acceptance:.0%}")
    console.print(table)
    console.print("ratio: reduced over whole, on the target's own keys and values; ratio alone: on its own throughout.")
    console.print(f"verdict: {rows['all'].verdict} (under 5 it can, over 20 it cannot)")
