"""The length with the greatest expected tokens per second, from measured acceptance and costs."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.step import Step
from hybridspec.drafts.length.estimates import AcceptanceEstimate, StepCosts
from hybridspec.drafts.length.options import checked, listed
from hybridspec.errors import InputError


class ExpectedGain(DraftLength):
    """Drafts the K that maximises expected tokens over expected time of a step,

        (1 + sum over k = 1..K of P(position k accepted)) / (draft(K) + verify(K) + commit(K))

    with K = 0, plain decoding, in the race. Both sides are learnt while decoding.

    When to use it: as the default. Workloads mix or change, or nobody has tuned K for this machine. It does not look at
    the drafted tokens, so it cannot tell an easy token from a hard one within a text; the entropy rules can.

    Cost: some arithmetic for each step, about 0.1 ms; at the start eight steps that try lengths out; now and then a
    step that looks whether things have changed. Where plain decoding is best, that is one probe in 32 plain steps at
    first, each time twice as many after a probe whose first token was rejected, up to 128; it then pays for the tokens
    that the draft has missed, too.

    The objective is the expectation of Leviathan et al. (arXiv 2211.17192) without the assumption that all positions
    are alike, over measured times as in TurboSpec's goodput (arXiv 2406.14066), with the rollback of hybrid models
    added. How acceptance and times are estimated is told in :mod:`hybridspec.drafts.length.estimates`.
    The constants are ours.

    Args:
        longest: greatest K.
        memory: drafting steps that acceptance is averaged over. Times are those of the last four times as many.
        prior: acceptance of a first token before any was seen.
        hysteresis: a new K must promise this part more than the present one.
        probe_interval: plain steps after which drafting is tried again.
        step_costs: time of a step that drafts 0, 1, ... tokens, in any unit, in place of measuring it, for example 1
            and K c + v(K) + r of a profile. ``longest`` is then at most the last of them, and nothing is tried out. On
            a command line with slashes: ``step_costs=1/1.4/1.6``.

    Attributes:
        k: the length that it holds for best at present; probes leave it.
    """

    #: Plain decoding is measured again only where drafting is not faster by more than this.
    CLOSE = 1.25
    #: What a probe leaves of older acceptance, and how far the interval between probes grows.
    PROBE_FADE, LONGEST_WAIT = 0.5, 4

    def __init__(
        self,
        longest: int = 8,
        memory: float = 32,
        prior: float = 0.7,
        hysteresis: float = 0.02,
        probe_interval: int = 32,
        step_costs: Sequence[float] | str | None = None,
    ) -> None:
        self.name = "expected-gain"
        self.longest = checked(self.name, "longest", longest, 1, whole=True)
        checked(self.name, "memory", memory, 1)
        checked(self.name, "prior", prior, 0, 1)
        self._hysteresis = checked(self.name, "hysteresis", hysteresis, 0)
        self._interval = checked(self.name, "probe_interval", probe_interval, 1, whole=True)
        self._known: list[float] | None = None
        if step_costs is not None:
            self._known = listed(self.name, "step_costs", step_costs)
            if len(self._known) < 2 or not all(0 < cost < float("inf") for cost in self._known):
                raise InputError(f"{self.name}: step_costs must be two or more times above 0, not {step_costs!r}")
            self.longest = min(self.longest, len(self._known) - 1)
        self._acceptance = AcceptanceEstimate(self.longest, memory, prior)
        self._costs = StepCosts(self.longest, round(4 * memory))
        # Twice, so that one slow moment does not decide. The longest block tells of all positions.
        first = [] if self._known else [*2 * [self.longest, (self.longest + 1) // 2, 1], 0, 0]
        self._try_out = deque(first)
        self._wait, self._since = self._interval, 0
        self._probing = False
        self.k = self.longest
        if self._known:
            rates = self.rates()
            self.k = rates.index(max(rates))
        self._next = self._try_out.popleft() if self._try_out else self.k

    def limit(self) -> int:
        return self._next

    def rates(self) -> list[float] | None:
        """Expected tokens per unit of time for K = 0 to ``longest``; None before drafting was measured."""
        by_position = self._acceptance.by_position()
        seconds = self._known[: self.longest + 1] if self._known else self._costs.table(by_position)
        if seconds is None:
            return None
        tokens = accumulate(by_position, initial=1.0)
        return [t / max(s, 1e-12) for t, s in zip(tokens, seconds, strict=True)]

    def observe(self, step: Step) -> None:
        self._acceptance.observe(step.drafted, step.accepted)
        self._costs.observe(step)
        if self._try_out:
            self._next = self._try_out.popleft()
            return
        rates = self.rates()
        if rates is None:
            # Whatever was asked for, the draft had nothing to say: it costs nothing to keep asking.
            self._next = self.k
            return
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > (1 + self._hysteresis) * rates[self.k]:
            self.k, self._since, self._wait, self._probing = best, 0, self._interval, False
        self._next = self._probe(step, rates) if self.k == 0 else self._plain_again(step, rates)

    def _probe(self, step: Step, rates: list[float]) -> int:
        """The next length while plain decoding is best."""
        if self._probing:
            # Accepted tokens call for another probe at once, and a rejection for a longer wait.
            again = step.accepted > 0
            if not again:
                self._wait, self._since = min(2 * self._wait, self.LONGEST_WAIT * self._interval), 0
        else:
            self._since += 1
            again = self._since >= self._wait
        self._probing = again
        if not again:
            return 0
        self._acceptance.fade(self.PROBE_FADE)
        return max(range(1, len(rates)), key=rates.__getitem__)

    def _plain_again(self, step: Step, rates: list[float]) -> int:
        """The next length while drafting is best: now and then 0, to see what a plain step costs today."""
        self._since = self._since + 1 if step.drafted else 0
        if self._known is None and self._since >= self._interval and rates[self.k] < self.CLOSE * rates[0]:
            self._since = 0
            return 0
        return self.k
