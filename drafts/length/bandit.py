"""A bandit over draft lengths."""

import math
from collections.abc import Sequence

from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.step import Step
from hybridspec.drafts.length.options import checked, listed
from hybridspec.errors import InputError


class Bandit(DraftLength):
    """Upper confidence bounds over a few lengths; the reward is tokens per second of the whole step.

    When to use it: nothing is known of costs and acceptance, and they do not factor as
    :class:`~hybridspec.drafts.length.expected_gain.ExpectedGain` assumes (a server whose load changes, a
    strategy that stops by itself). It learns of each length only by using it, so it needs hundreds of steps where the
    expected gain needs tens: a block of 8 tells ExpectedGain about all shorter ones, and the bandit about 8 only.

    Cost: a few arithmetic operations for each length and step, and the steps spent on lengths that are not the best.

    UCBSpec of BanditSpec (arXiv 2505.15141) with the lengths as its arms, and two changes. The reward is that of a
    renewal process, all tokens of an arm over all its seconds, instead of tokens per step, since steps of different
    lengths take different times. All counts fade by ``discount`` in each step (discounted UCB, arXiv 0805.3415), so
    that it follows a change. The next length maximises

        rate_k / max_j rate_j + exploration sqrt(ln(sum_j n_j) / n_k)

    after one step with each, the longest first. A step's time includes what a draft catches up on after plain steps.

    Args:
        lengths: the arms; 0 is plain decoding. On a command line with slashes: ``lengths=0/2/4/8``.
        exploration: weight of the bound. UCB1's sqrt(2) is made for rewards all over 0 to 1; the rates of draft
            lengths lie within some ten per cent of each other.
        discount: what one step leaves of the counts; 0.99 remembers about 100 steps, 1 forgets nothing.
    """

    def __init__(
        self, lengths: Sequence[int] | str = (0, 1, 2, 4, 6, 8), exploration: float = 0.1, discount: float = 0.99
    ) -> None:
        self.name = "bandit"
        arms = [checked(self.name, "lengths", k, 0, whole=True) for k in listed(self.name, "lengths", lengths)]
        self.lengths = sorted(set(arms))
        if not self.lengths:
            raise InputError(f"{self.name}: lengths is empty: give some, for example 0/2/4")
        self.longest = self.lengths[-1]
        self.exploration = checked(self.name, "exploration", exploration, 0)
        self.discount = checked(self.name, "discount", discount, 0, 1)
        self._tokens, self._seconds, self._counts = ([0.0] * len(self.lengths) for _ in range(3))
        self._arm = len(self.lengths) - 1

    def limit(self) -> int:
        return self.lengths[self._arm]

    def observe(self, step: Step) -> None:
        for kept in (self._tokens, self._seconds, self._counts):
            kept[:] = [value * self.discount for value in kept]
        self._tokens[self._arm] += 1 + step.accepted
        self._seconds[self._arm] += step.draft_seconds + step.verify_seconds + step.commit_seconds
        self._counts[self._arm] += 1
        self._arm = self._choose()

    def _choose(self) -> int:
        arms = range(len(self.lengths))
        # A count below the smallest normal number has faded to nothing.
        untried = [arm for arm in arms if self._counts[arm] < 1e-300]
        if untried:
            return untried[-1]
        rates = [self._tokens[arm] / max(self._seconds[arm], 1e-300) for arm in arms]
        fastest, explored = max(rates), math.log(max(1.0, sum(self._counts)))
        return max(
            arms,
            key=lambda arm: rates[arm] / fastest + self.exploration * math.sqrt(explored / self._counts[arm]),
        )
