"""What a draft-length rule learns from the steps: acceptance by position, and seconds by length."""

import statistics
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from hybridspec.decoding.step import Step


class AcceptanceEstimate:
    """How likely each position of a block is accepted.

    It counts *conditional* acceptance: position j is seen in a step that drafted it and accepted all before it. That is
    unbiased however the lengths of the steps vary, as long as they were set before the block; the unconditional share
    among steps that drafted j tokens mixes texts where j was worth drafting with those where it was not. The products
    of the conditional rates are the unconditional ones.

    Args:
        longest: number of positions.
        memory: steps that count; each fades by 1 - 1 / memory with every later step that drafted.
        prior: acceptance of the first position before anything is seen. Each further position starts from what is
            thought of the one before.
        weight: how many observations the prior is worth.
    """

    def __init__(self, longest: int, memory: float, prior: float, weight: float = 3.0) -> None:
        self._fade, self._prior, self._weight = 1 - 1 / memory, prior, weight
        self._seen, self._accepted = [0.0] * longest, [0.0] * longest

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.fade(self._fade)
        for position in range(min(drafted, accepted + 1, len(self._seen))):
            self._seen[position] += 1
            self._accepted[position] += position < accepted

    def fade(self, factor: float) -> None:
        """Makes everything seen so far count ``factor`` times as much."""
        self._seen = [count * factor for count in self._seen]
        self._accepted = [count * factor for count in self._accepted]

    def conditional(self) -> list[float]:
        """For each position: P(accepted | all before it were)."""
        rates, before = [], self._prior
        for seen, accepted in zip(self._seen, self._accepted, strict=True):
            before = (accepted + self._weight * before) / (seen + self._weight)
            rates.append(before)
        return rates

    def by_position(self) -> list[float]:
        """For each position: P(it and all before it are accepted), the unconditional rate."""
        return list(accumulate(self.conditional(), mul))


class Curve:
    """Seconds of a part of a step by number of drafted tokens, 1 and up.

    The median of the last 16 times of a length, none older than the last ``window`` times of any, counts as many
    observations; a line through all medians (least squares, not falling) counts as 4. So lengths that were never or
    long ago used follow from the others.
    """

    SAMPLES, LINE_WEIGHT = 16, 4.0

    def __init__(self, window: int) -> None:
        self._window, self._count = window, 0
        self._times: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, tuple[float, int]] = {}

    def add(self, length: int, seconds: float) -> None:
        self._count += 1
        self._times.setdefault(length, deque(maxlen=self.SAMPLES)).append((self._count, seconds))
        for other, times in list(self._times.items()):
            old = times[0][0] <= self._count - self._window
            if old:
                times.popleft()
            if not times:
                del self._times[other], self._medians[other]
            elif old or other == length:
                self._medians[other] = statistics.median(s for _, s in times), len(times)

    def table(self, longest: int, origin: float) -> list[float] | None:
        """Seconds for 1 to ``longest`` tokens; None before anything was measured.

        Args:
            origin: seconds for 0 tokens, through which the line goes where only one length was used.
        """
        if not self._medians:
            return None
        slope, start = line(self._medians, origin)
        table = []
        for k in range(1, longest + 1):
            median, count = self._medians.get(k, (0.0, 0))
            table.append((count * median + self.LINE_WEIGHT * (start + slope * k)) / (count + self.LINE_WEIGHT))
        return table


def line(points: Mapping[int, tuple[float, int]], origin: float) -> tuple[float, float]:
    """Slope (0 or more) and start of the weighted least-squares line through ``x -> (y, weight)``."""
    total = sum(weight for _, weight in points.values())
    x_mean = sum(x * weight for x, (_, weight) in points.items()) / total
    y_mean = sum(y * weight for y, weight in points.values()) / total
    if len(points) == 1:
        slope = (y_mean - origin) / x_mean
    else:
        spread = sum(weight * (x - x_mean) ** 2 for x, (_, weight) in points.items())
        slope = sum(weight * (x - x_mean) * (y - y_mean) for x, (y, weight) in points.items()) / spread
    slope = max(0.0, slope)
    return slope, y_mean - slope * x_mean


class StepCosts:
    """Seconds of a step by number of drafted tokens: draft, verify pass, and commit with or without rollback.

    Args:
        longest: most drafted tokens.
        window: drafting steps after which a time is forgotten.
    """

    def __init__(self, longest: int, window: int) -> None:
        self._longest = longest
        self._draft, self._verify = Curve(window), Curve(window)
        self._plain, self._whole, self._partial = (deque[float](maxlen=Curve.SAMPLES) for _ in range(3))
        self._behind = False

    def observe(self, step: Step) -> None:
        if step.drafted:
            # After a plain step a draft is first fed the tokens that it missed: that is not the price of a token.
            if not self._behind:
                self._draft.add(step.drafted, step.draft_seconds)
            self._verify.add(step.drafted, step.verify_seconds)
            commits = self._whole if step.accepted == step.drafted else self._partial
            commits.append(step.commit_seconds)
        else:
            self._plain.append(step.verify_seconds + step.commit_seconds)
        self._behind = not step.drafted

    def table(self, by_position: list[float]) -> list[float] | None:
        """Expected seconds of a step that drafts 0 to ``longest`` tokens; None before drafting was measured.

        A length 0 that was never measured is taken as a verify pass over no drafted token.

        Args:
            by_position: unconditional acceptance, which tells how often something is rolled back.
        """
        plain = statistics.median(self._plain) if self._plain else None
        verify = self._verify.table(self._longest, plain or 0.0)
        draft = self._draft.table(self._longest, 0.0)
        if verify is None or draft is None:
            return None
        whole, partial = (statistics.median(times) if times else None for times in (self._whole, self._partial))
        whole = partial if whole is None else whole
        partial = whole if partial is None else partial
        drafting = [
            d + v + kept * whole + (1 - kept) * partial for d, v, kept in zip(draft, verify, by_position, strict=True)
        ]
        return [verify[0] + whole if plain is None else plain, *drafting]
