"""The table that ``hybridspec tune`` prints, from a profile."""

from rich.table import Table


def profile_table(profile: dict) -> Table:
    table = Table(title="Best configuration by workload", title_justify="left")
    table.add_column("workload")
    table.add_column("draft", overflow="fold")
    table.add_column("draft length")
    for heading in ("acceptance rate", "acceptance length", "speed-up (90 % interval)", "predicted", "of ideal"):
        table.add_column(heading, justify="right")
    for name, row in profile["workloads"].items():
        chosen = row["chosen"]
        if chosen is None:
            table.add_row(name, "-", "-", "-", "-", "not measured", "-", "-")
            continue
        if chosen["length"] == "0":
            table.add_row(name, "-", "plain decoding", "-", "-", "1", "-", "-")
            continue
        low, high = row["speedup_interval_90"]
        predicted = next((p["speedup"] for p in row["predicted"] if p["label"] == chosen["label"]), None)
        rule = f"K = {chosen['length']}" if chosen["length"].isdecimal() else chosen["length"]
        table.add_row(
            name,
            chosen["draft"],
            rule + (", segmented" if chosen["segments"] else "") + ("" if row["complete"] else " so far"),
            "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
            f"{row['acceptance_length']:.2f}",
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})",
            "-" if predicted is None else f"{predicted:.2f}",
            "-" if row["efficiency"] is None else f"{row['efficiency']:.0%}",
        )
    return table


def concurrency_table(profile: dict) -> Table:
    """K by number of requests at a time, for the backends that measure it."""
    table = Table(title="By requests at a time", title_justify="left")
    table.add_column("workload")
    table.add_column("requests", justify="right")
    table.add_column("draft", overflow="fold")
    headings = ("K", "acceptance by position", "tokens/s", "speed-up (90 % interval)", "predicted")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in profile["workloads"].items():
        for requests, entry in (row["by_concurrency"] or {}).items():
            shares = (entry["acceptance"] or {}).get("by_position", ())
            interval = entry["interval_90"]
            speedup = "-" if entry["speedup"] is None else f"{entry['speedup']:.2f}"
            table.add_row(
                name,
                requests,
                entry["draft"] or "-",
                str(entry["k"]),
                " ".join(f"{share:.2f}" for share in shares) or "-",
                "-" if entry["tokens_per_second"] is None else f"{entry['tokens_per_second']:.1f}",
                speedup + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""),
                "-" if entry["predicted"] is None else f"{entry['predicted']:.2f}",
            )
    return table


def profile_notes(profile: dict) -> list[str]:
    """Why each workload's answer is what it is, and how well the cost model predicted."""
    notes = [
        f"{name}: {row['reason']}; stopped: {row['stopped'] or 'interrupted'}."
        for name, row in profile["workloads"].items()
        if row["reason"]
    ]
    errors = [e for row in profile["workloads"].values() if (e := row["prediction_error_median"]) is not None]
    if errors:
        middle = sorted(errors)[len(errors) // 2]
        notes.append(f"Cost model: predicted speed-ups were off by {middle:.1%} (median of the workloads' medians).")
    return notes
