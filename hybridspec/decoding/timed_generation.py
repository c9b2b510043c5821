"""One generation and its time, whoever decoded."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.decoding.step import Step


@dataclass(frozen=True)
class TimedGeneration:
    """Times are in seconds and leave the prefill out.

    Attributes:
        tokens: all generated ids.
        steps: empty where whoever decodes does not tell them.
        untimed: of the first tokens, how many came before the clock ran.
        prefill_seconds: wall clock before that; 0 where it was not measured.
    """

    tokens: Sequence[int]
    steps: Sequence[Step]
    wall_seconds: float
    cpu_seconds: float
    untimed: int = 0
    prefill_seconds: float = 0.0

    @property
    def timed_tokens(self) -> int:
        return len(self.tokens) - self.untimed

    @property
    def draft_seconds(self) -> float:
        return sum(step.draft_seconds for step in self.steps)

    @property
    def verify_seconds(self) -> float:
        return sum(step.verify_seconds for step in self.steps)
