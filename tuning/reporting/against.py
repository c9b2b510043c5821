"""Two profiles side by side: what each chose, what it gains, and whether they differ by more than noise."""

from collections.abc import Sequence

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import CostRecord, WorkloadProfile
from hybridspec.tuning.reporting.facts import flat

#: What differs between any two runs and explains nothing by itself, or is shown elsewhere.
ALWAYS = ("created", "machine.load_average")
#: In words; the profiles' names go in.
DIFFERENCES = {
    "first-gains-more": "{first} gains more",
    "second-gains-more": "{second} gains more",
    "noise": "inside the noise",
    "both-plain": "none: plain decoding",
    "unmeasured": "not measured in both",
    "only-first": "only in {first}",
    "only-second": "only in {second}",
}
PARTS = ("hybridspec", "backend", "target", "drafts", "machine", "settings")


def compare_profiles(first: Profile, second: Profile) -> dict:
    """``{"workloads": {name: {"first", "second", "difference", "acceptance_differs"}}, "changed": [...]}``, plain
    values for JSON.

    ``difference``: a key of :data:`DIFFERENCES`. The chosen configurations' speed-ups do not differ where their 90 %
    intervals overlap (plain decoding is exactly 1). ``acceptance_differs``: by draft that both have, the positions,
    from 1, where the 90 % intervals of its acceptance do not overlap. ``changed``: each field of environment, models
    and settings that differs, as ``{"field", "first", "second"}``; a field that one lacks is None there.
    """
    names = list(dict.fromkeys((*first.workloads, *second.workloads)))
    rows = {name: [p.workloads.get(name) for p in (first, second)] for name in names}
    return {
        "workloads": {
            name: {
                "first": summary(one),
                "second": summary(other),
                "difference": difference(one, other),
                "acceptance_differs": acceptance_differs(one, other) if one and other else {},
            }
            for name, (one, other) in rows.items()
        },
        "changed": changes(first, second),
    }


def summary(row: WorkloadProfile | None) -> dict | None:
    """The chosen configuration and its numbers; None where the workload is missing. Costs are in plain steps."""
    if row is None:
        return None
    chosen, costs = row.chosen, row.costs
    speculates = chosen is not None and chosen.length != "0"
    return {
        "chosen": chosen and chosen.to_dict(),
        "complete": row.complete,
        "speedup": row.speedup,
        "interval": row.speedup_interval_90,
        "acceptance_rate": row.acceptance_rate,
        "acceptance_length": row.acceptance_length,
        "draft_cost": costs.draft_ratio.get(chosen.draft) if speculates and costs else None,
        "rollback_cost": costs.rollback_ratio.get(chosen.draft) if speculates and costs else None,
        "verify_cost": verify_cost(costs, row.best_k) if speculates else None,
        "plain_step_seconds": costs.target_step_seconds if costs else None,
    }


def verify_cost(costs: CostRecord | None, k: int | None) -> float | None:
    """v(K) at the most tokens that the configuration drafts at once, where it was measured."""
    ratios = costs.verify_ratio_by_k if costs else []
    return ratios[k] if k is not None and k < len(ratios) else None


def bounds(row: WorkloadProfile) -> tuple[float, float] | None:
    """90 % interval of the answer's speed-up; None if nothing was measured or no interval is known."""
    if row.chosen is None:
        return None
    if row.chosen.length == "0":
        return 1.0, 1.0
    return tuple(row.speedup_interval_90) if row.speedup_interval_90 else None


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def difference(one: WorkloadProfile | None, other: WorkloadProfile | None) -> str:
    if one is None or other is None:
        return "only-second" if one is None else "only-first"
    ours, theirs = bounds(one), bounds(other)
    if ours is None or theirs is None:
        return "unmeasured"
    if one.chosen.length == other.chosen.length == "0":
        return "both-plain"
    if overlap(ours, theirs):
        return "noise"
    return "first-gains-more" if ours[0] > theirs[1] else "second-gains-more"


def difference_text(code: str, names: tuple[str, str]) -> str:
    return DIFFERENCES[code].format(first=names[0], second=names[1])


def acceptance_differs(one: WorkloadProfile, other: WorkloadProfile) -> dict[str, list[int]]:
    found = {}
    for draft in filter(other.acceptance.__contains__, one.acceptance):
        pairs = zip(one.acceptance[draft].interval_90, other.acceptance[draft].interval_90, strict=False)
        positions = [i for i, (ours, theirs) in enumerate(pairs, 1) if not overlap(ours, theirs)]
        if positions:
            found[draft] = positions
    return found


def changes(first: Profile, second: Profile) -> list[dict[str, str | None]]:
    told = [p.to_dict() for p in (first, second)]
    ours, theirs = (flat({part: p[part] for part in PARTS}) for p in told)
    return [
        {"field": name, "first": ours.get(name), "second": theirs.get(name)}
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name) and name not in ALWAYS
    ]
