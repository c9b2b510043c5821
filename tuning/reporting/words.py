"""How names and numbers of a profile read, the same in tables, plots and pages."""

from collections.abc import Iterable, Sequence

from hybridspec.tuning.profile_records import AcceptanceCurve, ConfigurationRecord, WorkloadProfile


def shorten(text: str, width: int) -> str:
    """Cut in the middle: the ends of names and paths tell them apart."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def short_names(specs: Iterable[str], width: int = 38) -> dict[str, str]:
    """A label for each draft: a folder's or a named model's last part, where that is still unique."""
    specs = list(dict.fromkeys(specs))
    last = {spec: _last_part(spec) for spec in specs}
    counts = list(last.values())
    return {spec: shorten(name if counts.count(name) == 1 else spec, width) for spec, name in last.items()}


def _last_part(spec: str) -> str:
    name = spec.rstrip("/").rsplit("/", 1)[-1]
    strategy, _, option = name.partition(":")
    return option if option and "=" not in option else name or spec


def rule_text(configuration: ConfigurationRecord) -> str:
    """``K = 4``, ``svip, segmented``, ``plain decoding``."""
    length = configuration.length
    if length == "0":
        return "plain decoding"
    rule = f"K = {length}" if length.isdecimal() else length
    extra = [", segmented"] * configuration.segments
    extra += [", block verification"] * (configuration.verification == "block")
    return rule + "".join(extra)


def chosen_text(chosen: ConfigurationRecord | None, complete: bool, labels: dict[str, str] | None = None) -> str:
    """What a workload should run with, in a few words."""
    if chosen is None:
        return "not measured"
    rule = rule_text(chosen)
    so_far = "" if complete else " so far"
    if chosen.length == "0":
        return rule + so_far
    return f"{(labels or {}).get(chosen.draft, chosen.draft)}, {rule}{so_far}"


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def percent(value: float | None) -> str:
    return number(value, ".0%")


def speedup_text(value: float | None, interval: Sequence[float] | None) -> str:
    """``1.57 (1.49 to 1.66)``"""
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def predicted_speedup(row: WorkloadProfile) -> float | None:
    """What the cost model expected of the chosen configuration."""
    chosen = row.chosen
    return next((p.speedup for p in row.predicted if chosen and p.label == chosen.label), None)


def prompts_behind(row: WorkloadProfile) -> int | None:
    """How many prompts the answer rests on: those of the chosen configuration, or, where plain decoding stays, of the
    best that was tried against it.
    """
    measured = [t for t in row.trials if not t.pruned and t.prompts is not None]
    chosen = [t for t in measured if row.chosen and t.label == row.chosen.label]
    best = chosen or sorted(measured, key=lambda t: t.speedup)[-1:]
    return best[0].prompts if best else None


def account(row: WorkloadProfile) -> str:
    """What was gained, why this answer, and why measuring ended, in sentences."""
    sentences = []
    if row.chosen and row.chosen.length != "0":
        gain = speedup_text(row.speedup, row.speedup_interval_90)
        count = prompts_behind(row)
        rests = f" on {count} prompt{'s' * (count != 1)}" if count else ""
        sentences.append(f"Speed-up over plain decoding{rests}: {gain}.")
    if row.reason:
        sentences.append(f"Why: {row.reason}.")
    if row.stopped:
        sentences.append(f"Measuring stopped: {row.stopped}.")
    elif not row.complete:
        sentences.append("Measuring was interrupted; the same command goes on.")
    error = row.prediction_error_median
    if error is not None:
        sentences.append(f"Predictions were off by {error:.1%} (median).")
    return " ".join(sentences)


def shares(curve: AcceptanceCurve) -> list[tuple[float, float, float]]:
    """(share, low, high) of acceptance by position; a share without an interval is its own."""
    intervals = [*curve.interval_90, *([None] * len(curve.by_position))]
    return [(s, *(pair or (s, s))) for s, pair in zip(curve.by_position, intervals, strict=False)]


def concurrency_rows(row: WorkloadProfile) -> list[tuple[str, int, float | None]]:
    """(requests at once, K, speed-up) of a backend that serves batches; empty where none did."""
    found = row.by_concurrency or {}
    return [(requests, entry.k, entry.speedup) for requests, entry in sorted(found.items(), key=lambda e: int(e[0]))]
