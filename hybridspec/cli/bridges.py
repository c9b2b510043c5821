"""``hybridspec bridges``: trains what stands in for a target's recurrent layers when it drafts for itself."""

from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli.common import TargetOption, ThreadsOption, load_target
from hybridspec.runtime.options import LoadOptions

HELP = """Trains bridges: small adapters in place of the target's recurrent layers, for the full-attention draft.

The target stays frozen; the bridges learn its hidden states and its output distribution on a corpus (.txt or .txt.gz
files, documents separated by <|endoftext|> lines). Ctrl-C keeps what was trained, and a second run with the same --out
goes on until the minutes are spent. The bridges then serve as full-attention:DIR, and `hybridspec probe` tells what
they are worth. Exit status 130: interrupted.

Example: hybridspec bridges --target ./Qwen3.5-0.8B --corpus ./texts --out ./bridges --minutes 60
"""


def bridges(
    corpus: Annotated[Path, typer.Option(help="Text file, or folder of text files; each file has the same share.")],
    out: Annotated[Path, typer.Option(help="Folder of the bridges, the checkpoint and the log.")],
    target: TargetOption = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time over all runs with this --out.")] = 15.0,
    window: Annotated[int, typer.Option(help="Tokens that a bridge sees, the present one included.")] = 4,
    inner: Annotated[int, typer.Option(help="Width inside a bridge.")] = 176,
    rows: Annotated[int, typer.Option(min=1, help="Windows of text per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each window.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    threads: ThreadsOption = 1,
) -> None:
    from hybridspec.drafts.full_attention.bridge_training import train_bridges

    runner = load_target(target, LoadOptions(), threads)
    options = {"window": window, "inner": inner, "rows": rows, "length": length, "seed": seed}
    run = train_bridges(runner, corpus, out, minutes=minutes, **options)
    typer.echo(f"{out}: bridges of {run.trained_seconds / 60:.1f} minutes, {run.step} steps")
    if run.progress < 1:
        typer.echo("interrupted: run the same command again to go on")
        raise typer.Exit(130)
