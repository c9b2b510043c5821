"""``hybridspec report``: table, plots and page of a profile; or two profiles side by side."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from hybridspec.tuning.profile import Profile

HELP = """Shows a profile that hybridspec tune wrote: a table, plots (PNG) and one self-contained page (HTML).

Nothing is measured or loaded; a profile from another machine will do. Files go beside the profile, or where --out or
--html says: acceptance.png, speedup.png, costs.png and report.html. With --against they are against.png and
against.html, and the table tells for each workload whether the two profiles differ by more than noise.

Example: hybridspec report tuned --against tuned-last-week --html compare.html
"""


def report(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="profile.json, or the folder with it.")] = Path(
        "hybridspec-tune"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder for plots and page. Default: the profile's.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="File for the page; without --out nothing else is written.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Another profile to compare with.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the profile, or the comparison, as JSON; files only with --out or --html."),
    ] = False,
) -> None:
    from rich.console import Console

    from hybridspec.cli.consoles import table_console
    from hybridspec.errors import InputError
    from hybridspec.tuning.profile import Profile

    first = Profile.load(profile)
    second = Profile.load(against) if against else None
    names = distinct_names(profile, against) if against else ("", "")
    if out is None and html is None and not as_json:
        out = profile if profile.is_dir() else profile.parent
    written = []
    try:
        if out or html:
            from hybridspec.tuning.reporting import write

            with Console(stderr=True).status("drawing"):
                if out:
                    written += (
                        write.write_comparison(first, second, names, out) if second else write.write_report(first, out)
                    )
                if html:
                    written.append(
                        write.write_against_page(first, second, names, html)
                        if second
                        else write.write_page(first, html)
                    )
    except OSError as error:
        raise InputError(
            f"{error.filename or out or html}: cannot be written: {error.strerror}. --out names another folder."
        ) from error
    if as_json:
        from hybridspec.tuning.reporting.against import compare_profiles

        json.dump(compare_profiles(first, second) if second else first.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    output = table_console(160)
    if second:
        show_comparison(output, first, second, names)
    else:
        show_profile(output, first)
    for path in written:
        output.print(f"Written: {path}", soft_wrap=True, markup=False)


def distinct_names(one: Path, other: Path) -> tuple[str, str]:
    """Folder names where they tell the profiles apart, else the paths."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in (one, other)]
    short = tuple(folder.name for folder in folders)
    return short if short[0] != short[1] and all(short) else (str(one), str(other))


def show_profile(output: "Console", profile: "Profile") -> None:
    from hybridspec.tuning.reporting.terminal import concurrency_tables, profile_notes, profile_table

    output.print(profile_table(profile))
    for table in concurrency_tables(profile):
        output.print(table)
    for note in profile_notes(profile):
        output.print(note, markup=False)


def show_comparison(output: "Console", first: dict, second: dict, names: tuple[str, str]) -> None:
    from hybridspec.tuning.reporting.against import compare_profiles
    from hybridspec.tuning.reporting.against_table import against_notes, against_table

    comparison = compare_profiles(first, second)
    output.print(against_table(comparison, names))
    for note in against_notes(comparison, names):
        output.print(note, markup=False, soft_wrap=True)
