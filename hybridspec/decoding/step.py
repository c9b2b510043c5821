"""What each round of the loop did, and the acceptance that follows from it."""

from dataclasses import dataclass, field


@dataclass
class Step:
    """One round of the loop; times in seconds of wall clock."""

    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float


@dataclass
class Statistics:
    """What the loop did so far. Filled while tokens are taken from :func:`decode`."""

    steps: list[Step] = field(default_factory=list)

    @property
    def drafted(self) -> int:
        return sum(s.drafted for s in self.steps)

    @property
    def accepted(self) -> int:
        return sum(s.accepted for s in self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, 1 + accepted / steps, the bonus or correction included."""
        return 1.0 + self.accepted / len(self.steps) if self.steps else None

    def acceptance_by_position(self) -> list[float]:
        """Share of steps in which position i was accepted, of the steps that drafted at least i tokens
        (unconditional).
        """
        longest = max((s.drafted for s in self.steps), default=0)
        counts = [[s.accepted > i for s in self.steps if s.drafted > i] for i in range(longest)]
        return [sum(hits) / len(hits) for hits in counts]
