"""A profile as pandas frames, for notebooks and for questions that the report does not answer."""

from typing import TYPE_CHECKING

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.reporting.costs import step_costs
from hybridspec.tuning.reporting.words import shares

if TYPE_CHECKING:
    import pandas

CONFIGURATION = ("draft", "length", "segments", "verification", "label")


def configurations_frame(profile: Profile) -> "pandas.DataFrame":
    """One row for every configuration that was predicted or measured.

    Args:
        profile: as :meth:`~hybridspec.tuning.profile.Profile.load` or ``Tuning.profile`` returns it.

    Returns:
        ``workload``, the configuration's fields, ``predicted`` (speed-up by the cost model), ``speedup`` (measured)
        with its 90 % interval ``speedup_low`` to ``speedup_high``, further numbers of the measurement as
        :class:`~hybridspec.tuning.measurement.Measurement` names them, ``pruned`` (given up: far slower) and
        ``chosen``. What is not known is missing (NaN).
    """
    import pandas

    rows = []
    for name, workload in profile.workloads.items():
        predicted = {p.label: p for p in workload.predicted}
        trials = {t.label: t for t in workload.trials}
        chosen = workload.chosen.label if workload.chosen else None
        for label, source in {**predicted, **trials}.items():
            trial = trials[label].to_dict() if label in trials else {}
            measured = {k: v for k, v in trial.items() if k not in (*CONFIGURATION, "acceptance_by_position")}
            low, high = measured.pop("interval", None) or (None, None)
            rows.append(
                {
                    "workload": name,
                    **{field: source[field] for field in CONFIGURATION},
                    "predicted": predicted[label].speedup if label in predicted else None,
                    "speedup": measured.pop("speedup", None),
                    "speedup_low": low,
                    "speedup_high": high,
                    **measured,
                    "pruned": trial.get("pruned", False),
                    "chosen": label == chosen,
                }
            )
    return pandas.DataFrame(rows)


def acceptance_frame(profile: Profile) -> "pandas.DataFrame":
    """Surveyed acceptance by position, one row for each ``workload``, ``draft`` and ``position`` (from 1):
    ``accepted``, the share of the steps that drafted the position in which it and all before it were accepted, with
    its 90 % interval ``low`` to ``high``.
    """
    import pandas

    rows = [
        {"workload": name, "draft": draft, "position": position, "accepted": share, "low": low, "high": high}
        for name, workload in profile.workloads.items()
        for draft, curve in workload.acceptance.items()
        for position, (share, low, high) in enumerate(shares(curve), 1)
    ]
    return pandas.DataFrame(rows, columns=["workload", "draft", "position", "accepted", "low", "high"])


def costs_frame(profile: Profile) -> "pandas.DataFrame":
    """What a step costs, one row for each ``workload``, ``draft`` and ``k``: ``draft_cost``, ``verify_cost`` and
    ``rollback_cost`` in plain steps of the target, their sum ``step_cost``, and ``tokens``, which a step that drafts
    all ``k`` brings (missing beyond the last position that the draft ever proposed).
    """
    import pandas

    rows = []
    for name, workload in profile.workloads.items():
        for draft in workload.costs.draft_ratio if workload.costs else ():
            parts, tokens = step_costs(workload, draft)
            for k in range(len(parts["verify"])):
                own = {f"{part}_cost": parts[part][k] for part in ("draft", "verify", "rollback")}
                brings = tokens[k] if k < len(tokens) else None
                rows.append({"workload": name, "draft": draft, "k": k, **own, "tokens": brings})
                rows[-1]["step_cost"] = sum(own.values())
    return pandas.DataFrame(
        rows, columns=["workload", "draft", "k", "draft_cost", "verify_cost", "rollback_cost", "step_cost", "tokens"]
    )
