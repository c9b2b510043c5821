"""What an engine is timed with: one workload at one number of requests at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridspec.acceptance_counts import AcceptanceCounts
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.config import StudySettings

#: Rounds of several requests at least, for an interval over rounds.
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """Prompts, and how many of them are sent at a time: a round is as many requests as ``concurrency`` says.

    ``prompts``: ids and whatever the engine takes for a prompt, in the order in which rounds take them.
    """

    workload: str
    concurrency: int
    ids: tuple[str, ...]
    prompts: tuple[Any, ...]
    settings: StudySettings

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.concurrency}"

    @property
    def rounds(self) -> list[list[int]]:
        """Indices of the prompts of each round: every prompt is sent at least once, some again to fill the last."""
        n, c = len(self.prompts), self.concurrency
        count = -(-n // c)
        if c > 1:
            count = max(LEAST_ROUNDS, count)
        rounds = [[(number * c + i) % n for i in range(c)] for number in range(count)]
        return rounds * self.settings.repeats

    @property
    def labels(self) -> list[str]:
        """What samples of the rounds are called: the prompt's id where a round is one prompt."""
        rounds = self.rounds
        once = len(rounds) // self.settings.repeats
        if self.concurrency == 1:
            return [self.ids[round_[0]] for round_ in rounds]
        return [f"round {i % once + 1}" for i in range(len(rounds))]


@dataclass(frozen=True)
class Round:
    """What one round showed.

    Attributes:
        seconds, rows, tokens: of decoding, prefill left out. A row is one sequence in one step.
        all_rows: rows of the whole round, as the counters count.
        drafts, drafted, accepted: differences of the engine's counters: rows that had a draft, drafted tokens, and
            accepted ones by position.
    """

    seconds: float
    rows: int
    tokens: int
    all_rows: int
    drafts: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(drafted, accepted) of each row. How many were accepted follows from the counters exactly, and so does how
        many were drafted if every draft was full; otherwise the drafted tokens are dealt out evenly.
        """
        reached = [self.drafts, *self.accepted, 0]
        accepted = [n for n in range(len(reached) - 1) for _ in range(reached[n] - reached[n + 1])][::-1]
        longest = len(self.accepted)
        if self.drafted == self.drafts * longest:
            drafted = [longest] * len(accepted)
        else:
            drafted = [max(1, n) for n in accepted]
            left = self.drafted - sum(drafted)
            while left > 0 and any(d < longest for d in drafted):
                for i in range(len(drafted)):
                    if left > 0 and drafted[i] < longest:
                        drafted[i], left = drafted[i] + 1, left - 1
        empty = max(0, self.all_rows - self.drafts)
        return (*zip(drafted, accepted, strict=True), *[(0, 0)] * empty)


@dataclass(frozen=True)
class Pooled:
    """Rounds of one load, taken together."""

    seconds: float
    rows: int
    tokens: int
    all_rows: int
    drafts: int
    drafted: int
    accepted: list[int]

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Pooled":
        longest = max((len(r.accepted) for r in rounds), default=0)
        sums = (sum(getattr(r, name) for r in rounds) for name in ("seconds", "rows", "tokens", "all_rows", "drafts"))
        accepted = [sum(r.accepted[i] for r in rounds if i < len(r.accepted)) for i in range(longest)]
        return cls(*sums, sum(r.drafted for r in rounds), accepted)

    @property
    def row_seconds(self) -> float:
        """Seconds of a step, shared among its rows."""
        return self.seconds / self.rows

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def counts(self) -> AcceptanceCounts:
        """As engines count: a draft has all K tokens."""
        return AcceptanceCounts(self.all_rows, (self.drafts,) * len(self.accepted), tuple(self.accepted))

    def acceptance_length(self, k: int) -> float:
        """Tokens per step if only the first ``k`` positions were drafted."""
        return self.counts.length(k) or 1.0


def paired(labels: Sequence[str], plain: Sequence[Round], own: Sequence[Round]) -> list[Sample]:
    """Round by round; rounds in which nothing was left to decode behind the first tokens are left out."""
    return [
        Sample(label, p.seconds, 0.0, p.tokens, r.seconds, 0.0, r.tokens, r.steps)
        for label, p, r in zip(labels, plain, own, strict=True)
        if p.tokens and r.tokens
    ]
