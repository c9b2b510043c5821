"""The table that ``hybridspec tune`` prints."""

from collections.abc import Sequence

from rich.table import Table

from hybridspec.tuning.study import WorkloadResult


def results_table(results: Sequence[WorkloadResult]) -> Table:
    table = Table(title="Draft length by workload", title_justify="left")
    table.add_column("workload")
    for heading in ("best K", "acceptance rate", "acceptance length", "speed-up (90 % interval)", "of ideal"):
        table.add_column(heading, justify="right")
    for result in results:
        best = result.best
        if best is None:
            table.add_row(result.name, "-", "-", "-", "no gain so far" if result.measurements else "not measured", "-")
            continue
        plain = best.k == 0
        low, high = best.interval
        table.add_row(
            result.name,
            str(best.k) + ("" if result.complete else " so far"),
            "-" if best.acceptance_rate is None else f"{best.acceptance_rate:.0%}",
            "-" if plain else f"{best.acceptance_length:.2f}",
            "plain decoding" if plain else f"{best.speedup:.2f} ({low:.2f} to {high:.2f})",
            "-" if plain or result.efficiency is None else f"{result.efficiency:.0%}",
        )
    return table


def noise_note(results: Sequence[WorkloadResult]) -> str | None:
    """How far plain decoding measured against itself strays from 1: the noise of this machine in this run."""
    plain = [m for r in results if (m := r.measurements.get(0))]
    if not plain:
        return None
    low, high = min(m.speedup for m in plain), max(m.speedup for m in plain)
    return (
        f"Noise: plain decoding measured against itself came out between {low:.2f} and {high:.2f} times its own speed."
    )
