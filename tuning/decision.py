"""From samples to an answer: what is a gain, what is a tie, and when nothing untried can win."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.configuration import PLAIN, Configuration

#: How far predictions are thought to stray from each other before that was seen; the more were tried, the less.
STRAY = 0.05
#: A configuration that could win by less is not worth another trial.
WORTHWHILE = 0.02
DRAWS = 2000
Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Answer:
    """The configuration to use, and why it and not another."""

    configuration: Configuration
    reason: str


def samples_table(samples: Sequence[Sample], clock: Clock = "wall") -> np.ndarray:
    """``[prompts, 4]``: plain seconds and tokens, seconds and tokens; repeats of a prompt summed."""
    rows: dict[str, np.ndarray] = {}
    for s in samples:
        plain, own = (s.plain_seconds, s.seconds) if clock == "wall" else (s.plain_cpu_seconds, s.cpu_seconds)
        row = np.array([plain, s.plain_tokens, own, s.tokens])
        rows[s.prompt] = rows.get(s.prompt, 0) + row
    return np.array(list(rows.values()))


def ratio(table: np.ndarray) -> np.ndarray:
    """Time per token of plain decoding over that of the configuration, prompts pooled."""
    plain_seconds, plain_tokens, seconds, tokens = np.moveaxis(table.sum(-2), -1, 0)
    return (plain_seconds / plain_tokens) / (seconds / tokens)


def bootstrap(prompts: int, value: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> tuple[float, float]:
    """90 % interval of ``value`` over drawn indices of prompts, ``[..., prompts]``.

    One prompt tells nothing about others: the interval then reaches from no difference to what was seen.
    """
    if prompts < 2:
        seen = float(value(np.arange(prompts))) if prompts else 1.0
        return min(1.0, seen), max(1.0, seen)
    values = value(np.random.default_rng(seed).integers(0, prompts, (DRAWS, prompts)))
    low, high = np.quantile(values, [0.05, 0.95])
    return float(low), float(high)


def relative_interval(better: Sequence[Sample], simpler: Sequence[Sample], seed: int = 0) -> tuple[float, float]:
    """Interval of the speed-up of one over the other, over the prompts that both decoded: see :func:`bootstrap`."""
    ours, theirs = ({s.prompt: [] for s in samples} for samples in (better, simpler))
    for kept, samples in ((ours, better), (theirs, simpler)):
        for s in samples:
            kept[s.prompt].append(s)
    shared = [p for p in ours if p in theirs]
    tables = [samples_table([s for p in shared for s in kept[p]]) for kept in (ours, theirs)]
    return bootstrap(len(shared), lambda drawn: ratio(tables[0][drawn]) / ratio(tables[1][drawn]), seed)


def shared_speedups(measured: Mapping[Configuration, Sequence[Sample]]) -> dict[Configuration, float]:
    """Speed-up of each speculative configuration over the prompts that all of them decoded, so that they compare."""
    measured = {c: s for c, s in measured.items() if not c.plain and s}
    if not measured:
        return {}
    shared = set.intersection(*({s.prompt for s in samples} for samples in measured.values()))
    return {c: speedup([s for s in samples if s.prompt in shared]) for c, samples in measured.items()}


def unsettled(measured: Mapping[Configuration, Sequence[Sample]]) -> list[Configuration]:
    """The configurations that further prompts could tell apart: the best one, when a gain that is worth having is still
    inside the noise, and the simpler one that is chosen in its place.
    """
    speedups, answer = shared_speedups(measured), decide(measured)
    if answer is None:
        return []
    best = max(speedups, key=speedups.get)
    chosen = answer.configuration
    lead = speedup(measured[best]) if chosen.plain else speedups[best] / speedups[chosen]
    if chosen == best or lead < 1.0 + WORTHWHILE:
        return []
    return [best] if chosen.plain else [best, chosen]


def decide(measured: Mapping[Configuration, Sequence[Sample]]) -> Answer | None:
    """The best measured configuration; if its lead over a simpler one is inside the noise, that one. None without any
    measurement of speculation.
    """
    speedups = shared_speedups(measured)
    if not speedups:
        return None
    first = max(speedups, key=speedups.get)
    low, high = against_plain(measured[first])
    gaining = {c: s for c, s in speedups.items() if against_plain(measured[c])[0] > 1.0}
    if not gaining:
        verb = "loses" if high < 1.0 else "gains nothing that stands out of the noise"
        return Answer(PLAIN, f"the best configuration, {first.label}, {verb} ({low:.2f} to {high:.2f})")
    best = max(gaining, key=gaining.get)
    simpler = sorted((c for c in gaining if c.complexity < best.complexity), key=lambda c: (c.complexity, -gaining[c]))
    for other in simpler:
        lead = relative_interval(measured[best], measured[other])
        if lead[0] <= 1.0:
            return Answer(other, f"a tie with {best.label}, which leads by {lead[0]:.2f} to {lead[1]:.2f}: simpler")
    if best != first:
        return Answer(best, f"the fastest of those that surely gain; {first.label} may not ({low:.2f} to {high:.2f})")
    return Answer(best, "the fastest of those measured")


def speedup(samples: Sequence[Sample], clock: Clock = "wall") -> float:
    """Time per token of plain decoding over that of the samples, prompts pooled."""
    return float(ratio(samples_table(samples, clock)))


def against_plain(samples: Sequence[Sample], clock: Clock = "wall") -> tuple[float, float]:
    """Interval of :func:`speedup` over prompts: see :func:`bootstrap`."""
    table = samples_table(samples, clock)
    return bootstrap(len(table), lambda drawn: ratio(table[drawn]))


def corrected(
    predicted: Mapping[Configuration, float], measured: Mapping[Configuration, float]
) -> tuple[dict[Configuration, float], float]:
    """Predictions of the untried configurations, corrected by how the tried ones came out, and the scatter of those.

    The median ratio of measured to predicted of the same draft, or of all if none of it was tried. The scatter is what
    was seen, and at least ``STRAY / sqrt(tried)``: one or two trials that agree prove little.
    """
    ratios = {c: measured[c] / predicted[c] for c in measured if predicted.get(c)}
    untried = {}
    for c, value in predicted.items():
        if c not in measured:
            same = [r for m, r in ratios.items() if m.draft == c.draft] or list(ratios.values())
            untried[c] = value * float(np.median(same)) if same else value
    every = list(ratios.values())
    scatter = float(np.max(np.abs(np.array(every) / np.median(every) - 1))) if every else 0.0
    return untried, max(scatter, STRAY / max(1, len(every)) ** 0.5)
