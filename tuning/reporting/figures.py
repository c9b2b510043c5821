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

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import WorkloadProfile
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
#: Inches of a panel's axes, and of what stands around them.
AXES_WIDTH, LONE_WIDTH, AXES_HEIGHT = 3.1, 3.6, 2.0
LEFT, RIGHT, TITLE_ROOM, TICK_ROOM = 0.75, 0.15, 0.45, 0.28
LETTERS_PER_INCH = 15


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


def workload_drafts(row: WorkloadProfile) -> list[str]:
    """Every draft that appears in a workload: surveyed, predicted or tried."""
    named = [*row.acceptance, *(c.draft for c in (*row.predicted, *row.trials))]
    return [draft for draft in dict.fromkeys(named) if draft]


def looks(profile: Profile) -> dict[str, Look]:
    """By draft, over the whole profile: a draft keeps its colour in every plot."""
    rows = profile.workloads.values()
    used = dict.fromkeys(draft for row in rows for draft in workload_drafts(row))
    drafts = [*(d for d in profile.drafts if d in used), *(d for d in used if d not in profile.drafts)]
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
    sentence: str,
    panels: Sequence[Panel],
    handles: Iterable[Artist],
    x_label: str,
    y_label: str,
    share_y: bool = True,
    tick_room: float = TICK_ROOM,
) -> Figure:
    """One panel per entry, at most three in a row, under a header that says what to see, above one legend.

    Sizes are in inches, so that text never meets text, whatever the number of panels. ``tick_room``: below each axes.
    """
    handles = list(handles)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    axes_width = LONE_WIDTH if columns == 1 else AXES_WIDTH
    gap = 0.25 if share_y else 0.5
    width = LEFT + columns * axes_width + (columns - 1) * gap + RIGHT
    lines = textwrap.wrap(sentence, int((width - 0.3) * LETTERS_PER_INCH))
    longest = max((len(h.get_label()) for h in handles), default=1)
    legend_columns = max(1, min(len(handles), int(width / (longest / LETTERS_PER_INCH + 0.7))))
    header = 0.42 + 0.17 * len(lines)
    footer = 0.35 + (0.1 + 0.18 * math.ceil(len(handles) / legend_columns) if handles else 0)
    row_height = TITLE_ROOM + AXES_HEIGHT + tick_room
    height = header + rows * row_height + footer
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(
            rows,
            columns,
            squeeze=False,
            sharey=share_y,
            gridspec_kw={
                "left": LEFT / width,
                "right": 1 - RIGHT / width,
                "top": 1 - (header + TITLE_ROOM) / height,
                "bottom": (footer + tick_room) / height,
                "wspace": gap / axes_width,
                "hspace": (TITLE_ROOM + tick_room) / AXES_HEIGHT,
            },
        )
        for i, ax in enumerate(axes.flatten()):
            if i >= len(panels):
                ax.set_visible(False)
                continue
            draw_panel(ax, panels[i], axes_width, keep_y=share_y)
            if i % columns == 0:
                ax.annotate(
                    y_label,
                    (0, 0.5),
                    ((0.12 - LEFT) * 72, 0),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    rotation=90,
                    va="center",
                )
        left = 0.12 / width
        figure.text(left, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", va="top")
        figure.text(left, 1 - 0.36 / height, "\n".join(lines), color=GREY, va="top", linespacing=1.3)
        figure.text(
            (LEFT + (width - LEFT - RIGHT) / 2) / width, (footer - 0.1) / height, x_label, ha="center", va="top"
        )
        if handles:
            figure.legend(handles=handles, loc="lower left", ncols=legend_columns, fontsize=8.5, labelspacing=0.3)
    return figure


def draw_panel(ax: Axes, panel: Panel, width: float, keep_y: bool) -> None:
    """``width`` in inches. ``keep_y``: an empty panel's y axis is shared with others."""
    ax.set_title(shorten(panel.title, int(width * 11)), loc="left", fontsize=9.5, fontweight="bold", pad=17)
    ax.annotate(
        shorten(panel.subtitle, int(width * 16)),
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
    if not keep_y:
        ax.set_yticks([])


def rendered(figure: Figure, form: str) -> bytes:
    """``png`` or ``svg``, without a date: the same profile gives the same file."""
    buffer = io.BytesIO()
    with rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks: boxes there, the page and the table have it right.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()
