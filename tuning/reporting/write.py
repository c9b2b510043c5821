"""Writes a profile's plots and page into a folder."""

from pathlib import Path

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.reporting.acceptance import acceptance_figure
from hybridspec.tuning.reporting.against import compare_profiles
from hybridspec.tuning.reporting.against_plot import against_figure
from hybridspec.tuning.reporting.costs import cost_figure
from hybridspec.tuning.reporting.figures import rendered
from hybridspec.tuning.reporting.page import against_page, report_page
from hybridspec.tuning.reporting.speedup import speedup_figure
from hybridspec.whole_file import write_whole

PAGE = "report.html"
PLOTS = {"acceptance.png": acceptance_figure, "speedup.png": speedup_figure, "costs.png": cost_figure}


def write_report(profile: Profile, out: Path) -> list[Path]:
    """``acceptance.png``, ``speedup.png``, ``costs.png`` and ``report.html`` in ``out``, which is made if it is
    missing; a profile without workloads has no plots. Returns what was written.

    Args:
        profile: as :meth:`~hybridspec.tuning.profile.Profile.load` returns it.
    """
    written = [write(out / name, rendered(draw(profile), "png")) for name, draw in PLOTS.items() if profile.workloads]
    return [*written, write_page(profile, out / PAGE)]


def write_page(profile: Profile, path: Path) -> Path:
    """The HTML page alone."""
    return write(path, report_page(profile).encode())


def write_comparison(first: dict, second: dict, names: tuple[str, str], out: Path) -> list[Path]:
    """``against.png`` and ``against.html`` in ``out``; ``names``: what to call the profiles."""
    figure = against_figure(compare_profiles(first, second), names)
    return [
        write(out / "against.png", rendered(figure, "png")),
        write_against_page(first, second, names, out / "against.html"),
    ]


def write_against_page(first: dict, second: dict, names: tuple[str, str], path: Path) -> Path:
    """The HTML page of two profiles alone."""
    return write(path, against_page(first, second, names).encode())


def write(path: Path, content: bytes) -> Path:
    """In one piece, in a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, content)
