"""Medians, and how far they can be trusted."""

from collections.abc import Sequence

import numpy as np

DRAWS = 2000


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75]) * 1e3
    return {"median_milliseconds": float(middle), "quartile_1": float(low), "quartile_3": float(high)}


def ratio_of_medians(over: Sequence[float], under: Sequence[float], seed: int = 0) -> tuple[float, list[float]]:
    """The ratio, and its 90 % bootstrap interval over repetitions."""
    rng = np.random.default_rng(seed)
    a, b = np.asarray(over), np.asarray(under)
    drawn = [np.median(rng.choice(a, len(a))) / np.median(rng.choice(b, len(b))) for _ in range(DRAWS)]
    return float(np.median(a) / np.median(b)), [float(x) for x in np.quantile(drawn, [0.05, 0.95])]
