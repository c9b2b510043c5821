"""What the runs of one configuration on one workload say, pooled over prompts and repeats."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.acceptance_counts import AcceptanceCounts
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.decision import against_plain, samples_table, speedup


@dataclass(frozen=True)
class Measurement:
    """One configuration on one workload.

    ``interval``: 90 %, bootstrap over prompts; from no gain to what was seen if there is only one. ``draft_cost``: time
    of one drafted token over one plain token. ``ideal_speedup``: the plain time of the same tokens over the time of
    drafting and verifying alone; ``efficiency``: measured / ideal, the loop's own overhead.
    """

    prompts: int
    speedup: float
    interval: tuple[float, float]
    cpu_speedup: float | None
    acceptance_rate: float | None
    acceptance_length: float
    acceptance_by_position: list[float]
    draft_length: float
    draft_cost: float | None
    ideal_speedup: float | None
    efficiency: float | None
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float


def measurement_of(samples: Sequence[Sample]) -> Measurement:
    """Pools the samples of one configuration."""
    table = samples_table(samples)
    plain_seconds, plain_tokens, seconds, tokens = table.sum(0)
    counts = AcceptanceCounts.of(step for s in samples for step in s.steps)
    drafted = sum(counts.drafted)
    draft_seconds, verify_seconds = (
        sum(getattr(s, name) for s in samples) for name in ("draft_seconds", "verify_seconds")
    )
    measured = speedup(samples)
    plain_token = plain_seconds / plain_tokens
    ideal = float(plain_token * tokens / (draft_seconds + verify_seconds)) if verify_seconds else None
    return Measurement(
        prompts=len(table),
        speedup=measured,
        interval=against_plain(samples),
        cpu_speedup=speedup(samples, "cpu") if all(s.cpu_seconds for s in samples) else None,
        acceptance_rate=counts.rate,
        acceptance_length=counts.length() or 1.0,
        acceptance_by_position=counts.by_position,
        draft_length=counts.draft_length or 0.0,
        draft_cost=float(draft_seconds / drafted / plain_token) if drafted and draft_seconds else None,
        ideal_speedup=ideal,
        efficiency=measured / ideal if ideal else None,
        tokens=int(tokens),
        plain_tokens_per_second=float(1 / plain_token),
        tokens_per_second=float(tokens / seconds),
    )
