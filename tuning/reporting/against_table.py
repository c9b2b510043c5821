"""The terminal's view of two profiles side by side."""

from rich.markup import escape
from rich.table import Table

from hybridspec.tuning.profile_records import ConfigurationRecord
from hybridspec.tuning.reporting.against import difference_text
from hybridspec.tuning.reporting.words import chosen_text, number, percent, short_names, speedup_text

COLUMNS = (
    "speed-up (90 % interval)",
    "acceptance rate",
    "acceptance length",
    "cost: draft, verify, rollback",
    "plain step (ms)",
)


def against_table(comparison: dict, names: tuple[str, str]) -> Table:
    """Two lines per workload; ``names``: of the profiles. Costs are in plain steps of the target."""
    table = Table(title="Two profiles, by workload", title_justify="left")
    for heading in ("workload", "profile", "run with"):
        table.add_column(heading, overflow="fold")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("difference")
    for name, pair in comparison["workloads"].items():
        for i, (side, profile) in enumerate(zip(("first", "second"), names, strict=True)):
            last = escape(difference_text(pair["difference"], names)) if i == 0 else ""
            table.add_row(
                escape(name) if i == 0 else "",
                escape(profile),
                *map(escape, cells(pair[side])),
                last,
                end_section=i == 1,
            )
    return table


def cells(side: dict | None) -> list[str]:
    """``run with`` and the numbers."""
    if side is None:
        return ["-"] * (1 + len(COLUMNS))
    chosen = side["chosen"] and ConfigurationRecord.model_validate(side["chosen"])
    step = side["plain_step_seconds"]
    costs = [side[f"{part}_cost"] for part in ("draft", "verify", "rollback")]
    return [
        chosen_text(chosen, side["complete"], short_names([chosen.draft]) if chosen else None),
        speedup_text(side["speedup"], side["interval"]),
        percent(side["acceptance_rate"]),
        number(side["acceptance_length"]),
        "-" if all(cost is None for cost in costs) else ", ".join(map(number, costs)),
        number(None if step is None else 1000 * step, ".3g"),
    ]


def against_notes(comparison: dict, names: tuple[str, str]) -> list[str]:
    """Where acceptance differs, and what changed around the models."""
    notes = [
        f"{name}: acceptance of {draft} differs by more than noise at position {', '.join(map(str, positions))}."
        for name, pair in comparison["workloads"].items()
        for draft, positions in pair["acceptance_differs"].items()
    ]
    if not comparison["changed"]:
        return [*notes, "Nothing recorded about environment, models and settings changed."]
    notes.append(f"Changed from {names[1]} to {names[0]}:")
    for change in comparison["changed"]:
        ours, theirs = ("absent" if change[side] is None else change[side] for side in ("first", "second"))
        notes.append(f"  {change['field']}: {theirs} -> {ours}")
    return notes
