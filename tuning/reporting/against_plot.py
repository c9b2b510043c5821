"""Plot: speed-ups of two profiles by workload."""

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hybridspec.tuning.reporting.figures import COLOURS, GREY, MARKERS, STYLE
from hybridspec.tuning.reporting.words import shorten


def against_figure(comparison: dict, names: tuple[str, str]) -> Figure:
    """The chosen configurations' speed-ups with 90 % intervals, two points per workload."""
    workloads = list(comparison["workloads"])
    height = 1.55 + 0.42 * max(1, len(workloads))
    with rc_context(STYLE):
        figure = Figure(figsize=(6.5, height))
        ax = figure.add_axes((0.27, 0.85 / height, 0.69, (height - 1.55) / height))
        for i, side in enumerate(("first", "second")):
            for row, name in enumerate(workloads):
                found = comparison["workloads"][name][side]
                if found is None or found["speedup"] is None:
                    continue
                value = found["speedup"]
                low, high = found["interval"] or (value, value)
                ax.errorbar(
                    value,
                    row + (i - 0.5) * 0.28,
                    xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
                    color=COLOURS[i],
                    marker=MARKERS[i],
                    markersize=5,
                )
        ax.axvline(1, color="black", linewidth=0.9)
        ax.set_yticks(range(len(workloads)), [shorten(name, 22) for name in workloads])
        ax.set_ylim(max(1, len(workloads)) - 0.5, -0.5)
        ax.set_xlabel("speed-up over plain decoding (plain time / its time)")
        left = 0.12 / 6.5
        figure.text(
            left, 1 - 0.1 / height, "Speed-up of the chosen configurations", fontsize=12, fontweight="bold", va="top"
        )
        text = "Bars are 90 % intervals; where they overlap, the difference is inside the noise."
        figure.text(left, 1 - 0.36 / height, text, color=GREY, va="top")
        handles = [
            Line2D([], [], color=COLOURS[i], marker=MARKERS[i], markersize=5, label=shorten(name, 40))
            for i, name in enumerate(names)
        ]
        figure.legend(handles=handles, loc="lower left", ncols=2, fontsize=8.5)
    return figure
