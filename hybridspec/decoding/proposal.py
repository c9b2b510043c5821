"""What a draft puts forward."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Drafted ``tokens`` and, when sampling, the distributions ``[K, vocab]`` they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None

    def first(self, k: int) -> "Proposal":
        """The first ``k`` tokens: for a strategy that gives more than it was asked for."""
        if len(self.tokens) <= k:
            return self
        return Proposal(self.tokens[:k], None if self.probabilities is None else self.probabilities[:k])
