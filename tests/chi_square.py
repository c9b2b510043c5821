"""Pearson's chi-square test of counts against exact probabilities, at one constant false-alarm rate."""

import numpy as np
import torch
from numpy.typing import ArrayLike

#: Chance that a right sampler fails a test. Seeds are fixed, so a test that passed once keeps passing.
FALSE_ALARM = 1e-6

#: Outcomes that expect fewer counts are grouped: the chi-square law is an approximation for large counts.
SMALLEST_EXPECTED = 5.0


def p_value(counts: ArrayLike, probabilities: ArrayLike) -> float:
    """Chance of counts at least this far from ``probabilities``; 0 if something impossible was counted."""
    observed, exact = np.asarray(counts, float).ravel(), np.asarray(probabilities, float).ravel()
    assert abs(exact.sum() - 1) < 1e-6, "these are not the probabilities of all outcomes"
    if observed[exact == 0].sum():
        return 0.0
    expected = exact * observed.sum()
    # Rarest first, into groups that each expect enough; the last outcome is the commonest, so its group does too.
    groups = [np.zeros(2)]
    for index in np.argsort(expected):
        if groups[-1][1] >= SMALLEST_EXPECTED:
            groups.append(np.zeros(2))
        groups[-1] += observed[index], expected[index]
    assert len(groups) > 1, "one group cannot be tested"
    statistic = sum((o - e) ** 2 / e for o, e in groups)
    freedom = torch.tensor((len(groups) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def follows(counts: ArrayLike, probabilities: ArrayLike) -> bool:
    return p_value(counts, probabilities) > FALSE_ALARM
