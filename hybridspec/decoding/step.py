"""What each round of the loop did, and the acceptance that follows from it."""

from dataclasses import dataclass, field

from hybridspec.acceptance_counts import AcceptanceCounts


@dataclass
class Step:
    """One round of the loop; times in seconds of wall clock, 0 where they were not measured."""

    drafted: int
    accepted: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


@dataclass
class Statistics:
    """What the loop did so far. Filled while tokens are taken from :func:`decode`."""

    steps: list[Step] = field(default_factory=list)

    @property
    def counts(self) -> AcceptanceCounts:
        return AcceptanceCounts.of((step.drafted, step.accepted) for step in self.steps)

    @property
    def drafted(self) -> int:
        """Tokens."""
        return sum(self.counts.drafted)

    @property
    def accepted(self) -> int:
        """Drafted tokens that stayed."""
        return sum(self.counts.accepted)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        return self.counts.rate

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step, 1 + accepted / steps, the bonus or correction included."""
        return self.counts.length()

    def acceptance_by_position(self) -> list[float]:
        """Share of steps in which position i was accepted, of the steps that drafted at least i tokens
        (unconditional).
        """
        return self.counts.by_position
