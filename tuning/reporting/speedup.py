"""Plot: what each draft and draft length gains, as predicted and as measured."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import ConfigurationRecord, WorkloadProfile
from hybridspec.tuning.reporting.figures import GREY, TICK_ROOM, Look, Panel, grid, looks, workload_drafts
from hybridspec.tuning.reporting.words import chosen_text, shorten, speedup_text


def speedup_figure(profile: Profile, workloads: Sequence[str] | None = None) -> Figure:
    """Speed-up over K: predicted as lines, measured as points with 90 % intervals; adaptive rules at the right."""
    names = list(profile.workloads) if workloads is None else list(workloads)
    rows = {name: profile.workloads[name] for name in names}
    styles = looks(profile)
    labels = {draft: look.label for draft, look in styles.items()}
    panels = []
    for name, row in rows.items():
        gain = "" if row.chosen is None else f": {speedup_text(row.speedup, row.speedup_interval_90)}"
        something = row.predicted or any(t.speedup or t.pruned for t in row.trials)
        draw = (lambda ax, r=row: draw_workload(ax, r, styles)) if something else None
        panels.append(Panel(name, chosen_text(row.chosen, row.complete, labels) + gain, draw))
    shown = [d for d in styles if any(d in workload_drafts(row) for row in rows.values())]
    return grid(
        "Speed-up over plain decoding",
        "Lines: predicted from one survey. Points: measured against plain decoding in the same minute, with 90 % "
        "intervals. Above 1 a configuration pays; K\u00a0=\u00a00 is plain decoding. " + takeaway(rows),
        panels,
        [*(draft_handle(styles[d], d, rows.values()) for d in shown), *form_handles(rows.values())],
        "draft length K (tokens); adaptive rules to the right",
        "speed-up (plain time / its time)",
        share_y=False,
        tick_room=0.7 if any(rules_of(row) for row in rows.values()) else TICK_ROOM,
    )


def takeaway(rows: dict[str, WorkloadProfile]) -> str:
    done = {name: row for name, row in rows.items() if row.chosen}
    if not done:
        return "Nothing has been measured yet."
    wins = {name: row for name, row in done.items() if row.chosen.length != "0"}
    if len(done) == 1:
        return "Speculation pays here." if wins else "Speculation does not pay here."
    if not wins:
        return f"Speculation pays on none of the {len(done)} workloads measured."
    best = max(wins, key=lambda name: wins[name].speedup)
    return (
        f"Speculation pays on {len(wins)} of the {len(done)} workloads measured, most on {shorten(best, 30)} "
        f"({wins[best].speedup:.2f})."
    )


def draft_handle(look: Look, draft: str, rows: Iterable[WorkloadProfile]) -> Line2D:
    """A draft of which nothing was measured has a line and no points."""
    handle = look.handle()
    if not any(t.draft == draft and t.speedup for row in rows for t in row.trials):
        handle.set_marker("")
    return handle


def rule_labels(rules: Sequence[str]) -> dict[str, str]:
    """A rule's name, with its options only where they tell it from another."""
    names = [rule.partition(":")[0] for rule in rules]
    return {rule: name if names.count(name) == 1 else rule for rule, name in zip(rules, names, strict=True)}


def form_handles(rows: Sequence[WorkloadProfile]) -> list[Line2D]:
    rows = list(rows)
    trials = [t for row in rows for t in row.trials]
    every = [*trials, *(p for row in rows for p in row.predicted)]
    marks = [
        (True, {"linestyle": "-", "label": "predicted"}),
        (any(c.segments for c in every), {"linestyle": "--", "label": "predicted, segmented"}),
        (any(not c.length.isdecimal() for c in every), {"marker": "_", "label": "predicted, rule"}),
        (any(t.speedup for t in trials), {"marker": "o", "label": "measured"}),
        (
            any(row.chosen for row in rows),
            {"marker": "o", "markersize": 10, "markerfacecolor": "none", "label": "chosen"},
        ),
        (any(t.pruned for t in trials), {"marker": "x", "label": "given up: far slower"}),
    ]
    return [Line2D([], [], **{"color": GREY, "markersize": 5, "linestyle": "", **mark}) for used, mark in marks if used]


def rules_of(row: WorkloadProfile) -> list[str]:
    """Draft-length rules that adapt: they have no place on an axis of K."""
    return list(dict.fromkeys(c.length for c in (*row.predicted, *row.trials) if not c.length.isdecimal()))


def draw_workload(ax: Axes, row: WorkloadProfile, styles: dict[str, Look]) -> None:
    every = [*row.predicted, *row.trials]
    fixed = [int(c.length) for c in every if c.length.isdecimal()]
    longest = max([1, *fixed])
    step = max(1.3, 0.11 * longest)
    place = {rule: longest + (i + 1) * step for i, rule in enumerate(rules_of(row))}

    def x(configuration: ConfigurationRecord) -> float:
        length = configuration.length
        return float(length) if length.isdecimal() else place[length]

    def shift(configuration: ConfigurationRecord) -> float:
        return step * styles[configuration.draft].shift if configuration.draft in styles else 0.0

    ax.axhline(1, color="black", linewidth=0.9)
    for draft, look in styles.items():
        for segments in (False, True):
            own = [p for p in row.predicted if p.draft == draft and p.segments == segments]
            line = sorted((x(p), p.speedup) for p in own if p.length.isdecimal())
            if line:
                line = [(0.0, 1.0), *line]
                ax.plot(*zip(*line, strict=True), color=look.colour, linewidth=1.4, linestyle="--" if segments else "-")
            for p in own:
                if not p.length.isdecimal():
                    ax.plot(x(p) + shift(p), p.speedup, color=look.colour, marker="_", markersize=9, mew=1.8)
    chosen = row.chosen
    for trial in row.trials:
        value = trial.speedup
        if value is None or trial.draft not in styles:
            continue
        look = styles[trial.draft]
        low, high = trial.interval or (value, value)
        spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
        at = x(trial) + shift(trial)
        ax.errorbar(
            at, value, yerr=spread, color=look.colour, marker=look.marker, markersize=5, elinewidth=1.2, zorder=3
        )
    if chosen:
        ringed = next((t for t in row.trials if t.label == chosen.label and t.speedup), None)
        value = ringed.speedup if ringed else row.speedup if chosen.length != "0" else 1.0
        if value is not None:
            ax.plot(
                x(chosen) + shift(chosen), value, marker="o", markersize=11, mfc="none", mec="black", mew=1.2, zorder=4
            )
    low, high = ax.get_ylim()
    low, high = min(low, 0.9), max(high, 1.1)
    ax.set_ylim(low - 0.06 * (high - low), high)
    for trial in row.trials:
        if trial.pruned and trial.draft in styles:
            ax.plot(x(trial) + shift(trial), low, color=styles[trial.draft].colour, marker="x", markersize=5, mew=1.5)
    ax.set_xlim(-0.5 * step, max([longest, *place.values()]) + 0.5 * step)
    stride = max(1, -(-(longest + 1) // 10))
    whole = list(range(0, longest + 1, stride))
    rules = [shorten(label, 14) for label in rule_labels(list(place)).values()]
    ax.set_xticks([*whole, *place.values()], [*map(str, whole), *rules])
    for label in ax.get_xticklabels()[len(whole) :]:
        label.set(rotation=25, ha="right", rotation_mode="anchor", fontsize=7.5)
