"""Plot: what a step costs, part by part, beside what it brings."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import WorkloadProfile
from hybridspec.tuning.reporting.figures import Panel, grid, looks
from hybridspec.tuning.reporting.words import shorten

PARTS = (("verify", "#56B4E9"), ("draft", "#E69F00"), ("rollback", "#CC79A7"))


def cost_figure(profile: Profile, workloads: Sequence[str] | None = None) -> Figure:
    """Cost of a step by K in units of a plain step: verify, draft and rollback, stacked; and the tokens it brings.

    Both of a step that drafts all K, for acceptance by position counts the steps that drafted the position.

    Each workload with one draft, see :func:`shown_draft`.
    """
    names = list(profile.workloads) if workloads is None else list(workloads)
    styles = looks(profile)
    panels = []
    for name in names:
        row = profile.workloads[name]
        draft = shown_draft(row)
        if draft is None:
            panels.append(Panel(name, "", None, "no step costs measured"))
            continue
        parts, tokens = step_costs(row, draft)
        best = best_ratio(parts, tokens)
        label = shorten(styles[draft].label if draft in styles else draft, 26)
        pays = f"best ratio {best[1]:.2f} at K = {best[0]}" if best[0] else "no K pays"
        panels.append(Panel(name, f"{label}: {pays}", lambda ax, p=parts, t=tokens: draw(ax, p, t)))
    handles = [Patch(color=colour, label=part) for part, colour in PARTS]
    handles.append(Line2D([], [], color="black", marker="o", markersize=4, label="tokens that it brings"))
    return grid(
        "What a step costs and what it brings",
        "Bars: time of a step that drafts K tokens, in plain steps of the target. Line: tokens that it brings. "
        "Drafting pays where the line lies above the bar. Over a whole text a draft that often proposes nothing, as "
        "prompt lookup does, gains less than this ratio.",
        panels,
        handles if any(panel.draw for panel in panels) else [],
        "draft length K (tokens)",
        "plain steps, and tokens",
    )


def shown_draft(row: WorkloadProfile) -> str | None:
    """The chosen draft; where plain decoding was chosen, the one with the best prediction. None without costs."""
    if not row.costs:
        return None
    known = [d for d in row.costs.draft_ratio if d in row.costs.rollback_ratio]
    chosen = row.chosen.draft if row.chosen else None
    if chosen in known:
        return chosen
    ranked = sorted(row.predicted, key=lambda p: -p.speedup)
    return next((p.draft for p in ranked if p.draft in known), known[0] if known else None)


def step_costs(row: WorkloadProfile, draft: str) -> tuple[dict[str, list[float]], list[float]]:
    """By K from 0: each part over a plain step, and tokens of the step (1 + sum of the acceptance by position).

    Tokens end at the last position that the draft ever proposed.
    """
    costs = row.costs
    verify = costs.verify_ratio_by_k
    shares = row.acceptance.get(draft, {"by_position": []}).by_position
    rollback = costs.rollback_ratio[draft]
    parts = {
        "verify": list(verify),
        "draft": [k * costs.draft_ratio[draft] for k in range(len(verify))],
        # A plain step commits too: what of it is not verification.
        "rollback": [rollback if k else max(0.0, 1.0 - verify[0]) for k in range(len(verify))],
    }
    return parts, [1.0 + sum(shares[:k]) for k in range(min(len(verify), len(shares) + 1))]


def best_ratio(parts: dict[str, list[float]], tokens: Sequence[float]) -> tuple[int, float]:
    """The K with the most tokens for its cost, and that ratio; 0 if no K beats plain decoding."""
    totals = [sum(part) for part in zip(*parts.values(), strict=True)]
    ratios = {0: 1.0} | {k: tokens[k] / totals[k] for k in range(1, len(tokens)) if totals[k] > 0}
    best = max(ratios, key=ratios.get)
    return best, ratios[best]


def draw(ax: Axes, parts: dict[str, list[float]], tokens: Sequence[float]) -> None:
    ks = range(len(parts["verify"]))
    below = [0.0] * len(ks)
    for part, colour in PARTS:
        ax.bar(ks, parts[part], bottom=below, width=0.7, color=colour)
        below = [b + p for b, p in zip(below, parts[part], strict=True)]
    ax.plot(ks[: len(tokens)], tokens, color="black", marker="o", markersize=3.5, linewidth=1.4)
    ax.grid(visible=False, axis="x")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
