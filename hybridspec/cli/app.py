"""Puts the subcommands together and turns errors into messages and exit statuses.

0: done. 1: the command ran and the answer is bad (for example outputs that differ). 2: bad input or a model that
    cannot be used. 130: interrupted; what was measured is kept.
"""

import os
import sys

# Nothing is ever downloaded: models are local folders.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import typer

from hybridspec.cli import (
    audit,
    bridges,
    check,
    compare,
    distill,
    explain,
    export,
    families,
    generate,
    probe,
    report,
    tune,
)
from hybridspec.errors import HybridspecError

app = typer.Typer(
    help="Speculative decoding for hybrid language models, with exact state rollback.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("tune", help=tune.HELP)(tune.tune)
app.command("report", help=report.HELP)(report.report)
app.command("generate", help=generate.HELP)(generate.generate)
app.command("compare", help=compare.HELP)(compare.compare)
app.command("probe", help=probe.HELP)(probe.probe)
app.command("bridges", help=bridges.HELP)(bridges.bridges)
app.command("distill", help=distill.HELP)(distill.distill)
app.command("families", help=families.HELP)(families.families)
app.command("check", help=check.HELP)(check.check)
app.add_typer(audit.app, name="audit")
app.command("explain", help=explain.HELP)(explain.explain)
app.add_typer(export.app, name="export")


def show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(version("hybridspec"))
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Show the version."),
) -> None:
    """Common options."""


def main() -> None:
    try:
        app(standalone_mode=True)
    except HybridspecError as error:
        print(f"hybridspec: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("hybridspec: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
