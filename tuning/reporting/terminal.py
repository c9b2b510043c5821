"""What ``hybridspec tune`` and ``hybridspec report`` print, from a profile."""

from rich.markup import escape
from rich.table import Table

from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import ConcurrencyRecord
from hybridspec.tuning.reporting.words import (
    concurrency_rows,
    number,
    percent,
    predicted_speedup,
    prompts_behind,
    rule_text,
    speedup_text,
)


def profile_table(profile: Profile) -> Table:
    table = Table(title="Best configuration by workload", title_justify="left")
    table.add_column("workload", overflow="fold")
    table.add_column("draft", overflow="fold")
    table.add_column("draft length")
    figures = ("acceptance rate", "acceptance length", "speed-up (90 % interval)", "prompts", "predicted", "of ideal")
    for heading in figures:
        table.add_column(heading, justify="right")
    for name, row in profile.workloads.items():
        chosen = row.chosen
        if chosen is None:
            table.add_row(escape(name), "-", "-", "-", "-", "not measured", "-", "-", "-")
            continue
        rule = escape(rule_text(chosen)) + ("" if row.complete else " so far")
        prompts = number(prompts_behind(row), "d")
        if chosen.length == "0":
            table.add_row(escape(name), "-", rule, "-", "-", "1", prompts, "-", "-")
            continue
        table.add_row(
            escape(name),
            escape(chosen.draft.removeprefix("same-architecture:")),
            rule,
            percent(row.acceptance_rate),
            number(row.acceptance_length),
            speedup_text(row.speedup, row.speedup_interval_90),
            prompts,
            number(predicted_speedup(row)),
            percent(row.efficiency),
        )
    return table


def concurrency_tables(profile: Profile) -> list[Table]:
    """Draft length by number of requests at once, of workloads whose backend serves batches."""
    tables = []
    for name, row in profile.workloads.items():
        rows = concurrency_rows(row)
        if rows:
            table = Table("requests at once", "K", "speed-up", title=escape(name), title_justify="left")
            for heading in ("predicted", "tokens/s", "acceptance by position"):
                table.add_column(heading, justify="right")
            for requests, k, gain in rows:
                table.add_row(escape(requests), str(k), number(gain), *_details(row.by_concurrency[requests]))
            tables.append(table)
    return tables


def _details(entry: ConcurrencyRecord) -> list[str]:
    """What an entry has beside K and speed-up: prediction, speed, acceptance."""
    shares = " ".join(number(share) for share in entry.acceptance.by_position) if entry.acceptance else ""
    return [number(entry.predicted), number(entry.tokens_per_second), shares or "-"]


def profile_notes(profile: Profile) -> list[str]:
    """Why each workload's answer is what it is, and how well the cost model predicted."""
    notes = [
        f"{name}: {row.reason}; stopped: {row.stopped or 'interrupted'}."
        for name, row in profile.workloads.items()
        if row.reason
    ]
    errors = [e for row in profile.workloads.values() if (e := row.prediction_error_median) is not None]
    if errors:
        middle = sorted(errors)[len(errors) // 2]
        notes.append(f"Cost model: predicted speed-ups were off by {middle:.1%} (median of the workloads' medians).")
    return notes
