"""What the runs of one way on some prompts come to: the row of a table."""

import statistics
from collections.abc import Sequence

from benchmarks.grids import number, share, spread
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.measurement import measurement_of

HEADINGS = ("tokens/s, pooled", "ms/token, median", "speed-up (90 %)", "CPU speed-up", "acceptance", "tau")


def row_of(samples: Sequence[Sample]) -> dict:
    """Numbers of one way; speed-ups are over the plain decoding that the samples are paired with."""
    m = measurement_of(samples)
    speculative = bool(m.acceptance_rate)
    return {
        "tokens_per_second": m.tokens_per_second,
        "median_milliseconds_per_token": statistics.median(s.seconds / s.tokens for s in samples) * 1e3,
        "speedup": m.speedup,
        "interval_90": m.interval,
        "cpu_speedup": m.cpu_speedup,
        "acceptance_rate": m.acceptance_rate,
        "acceptance_length": m.acceptance_length if speculative else None,
        "draft_cost": m.draft_cost,
        "ideal_speedup": m.ideal_speedup if speculative else None,
        "efficiency": m.efficiency if speculative else None,
    }


def cells(row: dict) -> list[str]:
    """Under :data:`HEADINGS`."""
    return [
        number(row["tokens_per_second"], 1),
        number(row["median_milliseconds_per_token"], 1),
        spread(row["speedup"], row["interval_90"]),
        number(row["cpu_speedup"]),
        share(row["acceptance_rate"]),
        number(row["acceptance_length"]),
    ]
