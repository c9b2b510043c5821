"""What was drafted and what was accepted, counted by position: the rates that all tables and profiles show."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counts of speculative steps, of the loop or from an engine's counters.

    Attributes:
        steps: all of them, those without a draft included.
        drafted: for each position, the steps that drafted it.
        accepted: for each position, the steps in which it was accepted.
    """

    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, steps: Iterable[tuple[int, int]]) -> "AcceptanceCounts":
        """From (drafted, accepted) tokens of each step."""
        steps = list(steps)
        positions = range(max((drafted for drafted, _ in steps), default=0))
        return cls(
            len(steps),
            tuple(sum(drafted > i for drafted, _ in steps) for i in positions),
            tuple(sum(accepted > i for _, accepted in steps) for i in positions),
        )

    @property
    def rate(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else None

    def length(self, longest: int | None = None) -> float | None:
        """Tokens per step, the bonus or correction included; None without steps.

        Args:
            longest: as if only so many positions had been drafted. Acceptance of a position does not depend on how many
                come after it.
        """
        return 1.0 + sum(self.accepted[:longest]) / self.steps if self.steps else None

    @property
    def draft_length(self) -> float | None:
        """Drafted tokens per step; None without steps."""
        return sum(self.drafted) / self.steps if self.steps else None

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that drafted position i in which it was accepted (unconditional)."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]
