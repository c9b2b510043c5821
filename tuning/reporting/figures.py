"""What the plots share: a grid with one panel per workload, colours, header and legend."""

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hybridspec.tuning.reporting.words import short_names, shorten

#: Told apart by people who do not see all colours (Okabe and Ito 2008); the markers help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX"
GREY = "#555555"
STYLE = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    # Names are text, also those with a dollar sign.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    # The same profile gives the same bytes.
    "svg.hashsalt": "hybridspec",
}
PANEL_INCHES = (3.7, 2.7)
LETTERS_PER_INCH = 13.5


@dataclass(frozen=True)
class Look:
    """How one draft appears in every panel. ``shift``: along x, so that drafts do not cover each other."""

    colour: str
    marker: str
    label: str
    shift: float

    def handle(self) -> Line2D:
        return Line2D([], [], color=self.colour, marker=self.marker, markersize=5, linewidth=1.5, label=self.label)


@dataclass(frozen=True)
class Panel:
    """``draw`` None: ``missing`` says why there is nothing to see."""

    title: str
    subtitle: str
    draw: Callable[[Axes], None] | None
    missing: str = "nothing measured"


def workload_drafts(row: dict) -> list[str]:
    """Every draft that appears in a workload: surveyed, predicted or tried."""
    named = [*row["acceptance"], *(c["draft"] for c in (*row["predicted"], *row["trials"]))]
    return [draft for draft in dict.fromkeys(named) if draft]


def looks(profile: dict) -> dict[str, Look]:
    """By draft, over the whole profile: a draft keeps its colour in every plot."""
    rows = profile["workloads"].values()
    used = dict.fromkeys(draft for row in rows for draft in workload_drafts(row))
    drafts = [*(d for d in profile["drafts"] if d in used), *(d for d in used if d not in profile["drafts"])]
    labels = short_names(drafts)
    step = min(0.12, 0.5 / max(1, len(drafts)))
    return {
        draft: Look(
            COLOURS[i % len(COLOURS)],
            MARKERS[i % len(MARKERS)],
            # matplotlib leaves labels out that begin with an underscore.
            labels[draft] if not labels[draft].startswith("_") else f" {labels[draft]}",
            (i - (len(drafts) - 1) / 2) * step,
        )
        for i, draft in enumerate(drafts)
    }


def grid(
    title: str,
    sentences: Sequence[str],
    panels: Sequence[Panel],
    handles: Iterable[Artist],
    x_label: str,
    y_label: str,
    share_y: bool = True,
) -> Figure:
    """One panel per entry, at most three in a row, under a header that says what to see, above one legend."""
    handles = list(handles)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    width = 5.6 if columns == 1 else columns * PANEL_INCHES[0]
    lines = [line for s in sentences for line in textwrap.wrap(s, int(width * LETTERS_PER_INCH))]
    longest = max((len(h.get_label()) for h in handles), default=1)
    legend_columns = max(1, min(len(handles), int(width / (longest / LETTERS_PER_INCH + 0.7))))
    header = 0.42 + 0.17 * len(lines)
    footer = 0.1 + 0.19 * math.ceil(len(handles) / legend_columns) if handles else 0.05
    height = header + rows * PANEL_INCHES[1] + footer
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(rect=(0, footer / height, 1, 1 - (header + footer) / height), hspace=0.06)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten()
        for ax, panel in zip(axes, panels, strict=False):
            draw_panel(ax, panel)
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        figure.supxlabel(x_label, fontsize=9)
        figure.supylabel(y_label, fontsize=9)
        left = 0.12 / width
        figure.text(left, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", va="top")
        figure.text(left, 1 - 0.36 / height, "\n".join(lines), color=GREY, va="top", linespacing=1.3)
        if handles:
            figure.legend(
                handles=handles, loc="lower left", ncols=legend_columns, fontsize=8.5, borderaxespad=0.3, labelspacing=0.3
            )
    return figure


def draw_panel(ax: Axes, panel: Panel) -> None:
    letters = int(PANEL_INCHES[0] * LETTERS_PER_INCH)
    ax.set_title(shorten(panel.title, letters - 6), loc="left", fontsize=9.5, fontweight="bold", pad=17)
    ax.annotate(
        shorten(panel.subtitle, letters + 2),
        (0, 1),
        (0, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=GREY,
    )
    if panel.draw is not None:
        panel.draw(ax)
        return
    ax.text(0.5, 0.5, panel.missing, transform=ax.transAxes, ha="center", va="center", color=GREY)
    ax.set_xticks([])
    ax.grid(False)


def rendered(figure: Figure, form: str) -> bytes:
    """``png`` or ``svg``, without a date: the same profile gives the same file."""
    buffer = io.BytesIO()
    with rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks: boxes there, the page and the table have it right.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()
