"""What the runs of one configuration on one workload say, pooled over prompts and repeats."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.decoder import Statistics, Step
from hybridspec.tuning.trial import Pair, speedup, speedup_interval


@dataclass(frozen=True)
class Measurement:
    """One configuration on one workload.

    ``draft_cost``: time of one drafted token over one plain target step. ``ideal_speedup``: the plain time of the same
    tokens over the time of drafting and verifying alone; ``efficiency``: measured / ideal, the loop's own overhead.
    """

    speedup: float
    interval: tuple[float, float]
    cpu_speedup: float
    acceptance_rate: float | None
    acceptance_length: float
    acceptance_by_position: list[float]
    draft_length: float
    draft_cost: float | None
    ideal_speedup: float
    efficiency: float
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float


def summarise(pairs: Sequence[Pair]) -> Measurement:
    """Pools the pairs of one configuration."""
    loop = Statistics([step for pair in pairs for step in pair.speculative.steps])
    plain_step = statistics.median(step_seconds(step) for pair in pairs for step in pair.plain.steps)
    tokens = sum(len(p.speculative.tokens) for p in pairs)
    draft_seconds = sum(s.draft_seconds for s in loop.steps)
    working_seconds = draft_seconds + sum(s.verify_seconds for s in loop.steps)
    # Both sides by means over the same runs: medians of skewed times are not what a run takes in all.
    plain_seconds = sum(step_seconds(step) for pair in pairs for step in pair.plain.steps)
    plain_tokens = sum(len(p.plain.tokens) for p in pairs)
    ideal = (plain_seconds / plain_tokens) * tokens / working_seconds
    measured = speedup(pairs)
    return Measurement(
        speedup=measured,
        interval=speedup_interval(pairs),
        cpu_speedup=speedup(pairs, "cpu_seconds"),
        acceptance_rate=loop.acceptance_rate,
        acceptance_length=loop.acceptance_length,
        acceptance_by_position=loop.acceptance_by_position(),
        draft_length=loop.drafted / len(loop.steps),
        draft_cost=draft_seconds / loop.drafted / plain_step if loop.drafted else None,
        ideal_speedup=ideal,
        efficiency=measured / ideal,
        tokens=tokens,
        plain_tokens_per_second=plain_tokens / sum(p.plain.wall_seconds for p in pairs),
        tokens_per_second=tokens / sum(p.speculative.wall_seconds for p in pairs),
    )


def step_seconds(step: Step) -> float:
    return step.draft_seconds + step.verify_seconds + step.commit_seconds
