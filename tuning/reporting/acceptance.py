"""Plot: how far into a block each draft is still right."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.reporting.figures import Look, Panel, grid, looks
from hybridspec.tuning.reporting.words import chosen_text, percent, shares, shorten


def acceptance_figure(profile: Profile, workloads: Sequence[str] | None = None) -> Figure:
    """Acceptance by position (unconditional) with 90 % intervals, a line per draft, a panel per workload."""
    names = list(profile.workloads) if workloads is None else list(workloads)
    styles = looks(profile)
    labels = {draft: look.label for draft, look in styles.items()}
    panels = []
    for name in names:
        row = profile.workloads[name]
        curves = {draft: a for draft, a in row.acceptance.items() if a.by_position}
        steps = max((a.steps for a in curves.values()), default=0)
        seen = f"chosen: {chosen_text(row.chosen, row.complete, labels)}" + (f"; up to {steps} steps" if steps else "")
        missing = "no draft proposed anything" if row.acceptance else "nothing measured"
        panels.append(Panel(name, seen, (lambda ax, c=curves: draw(ax, c, styles)) if curves else None, missing))
    shown = [d for d in styles if any(d in profile.workloads[name].acceptance for name in names)]
    return grid(
        "Acceptance by position",
        "A drafted token counts only if all before it were accepted too. Bars are 90 % intervals. "
        "Where a line comes near zero, drafting further only costs. " + takeaway(profile, names, labels),
        panels,
        [styles[d].handle() for d in shown],
        "position in the drafted block",
        "accepted (share of steps)",
    )


def takeaway(profile: Profile, names: Sequence[str], labels: dict[str, str]) -> str:
    firsts = [
        (a.by_position[0], labels.get(draft, draft), name)
        for name in names
        for draft, a in profile.workloads[name].acceptance.items()
        if a.by_position
    ]
    if not firsts:
        return "No draft has been surveyed yet."
    low, high = min(firsts), max(firsts)
    where = (lambda entry: f"{entry[1]}, {shorten(entry[2], 30)}") if len(names) > 1 else (lambda entry: entry[1])
    if percent(low[0]) == percent(high[0]):
        return f"At position\u00a01: {percent(high[0])}."
    return f"At position\u00a01: {percent(low[0])} ({where(low)}) to {percent(high[0])} ({where(high)})."


def draw(ax: Axes, curves: dict[str, dict], styles: dict[str, Look]) -> None:
    for draft, curve in curves.items():
        look, points = styles[draft], shares(curve)
        ax.errorbar(
            [i + 1 + look.shift for i in range(len(points))],
            [share for share, _, _ in points],
            yerr=[[max(0.0, s - low) for s, low, _ in points], [max(0.0, high - s) for s, _, high in points]],
            color=look.colour,
            marker=look.marker,
            markersize=4,
            linewidth=1.4,
            elinewidth=0.9,
        )
    longest = max(len(c.by_position) for c in curves.values())
    ax.set_xlim(0.5, longest + 0.5)
    ax.set_ylim(0, 1.02)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
