"""How many tokens to draft: the base of all rules, and the fixed length.

A rule may look at the past, at the draft's distributions and at tokens that stay in the block; K is then a stopping
time, and sampling stays exact (docs/exactness.md).
"""

from abc import ABC, abstractmethod

from torch import Tensor

from hybridspec.decoding.step import Step
from hybridspec.errors import InputError


class DraftLength(ABC):
    """A draft-length rule. It may learn from step to step and from sequence to sequence; make a new one to forget.

    Attributes:
        name: in tables and profiles.
        longest: most tokens that it ever asks for.
        demanded: tokens that must fit into the context behind the prompt; a rule that adapts takes what room there is.
        looks_at_drafts: whether :meth:`proceed` is to be asked, which costs a softmax for each drafted token.
    """

    name: str
    longest: int
    demanded = 0
    looks_at_drafts = False

    @property
    def learns(self) -> bool:
        """Whether steps change what the rule does later."""
        return type(self).observe is not DraftLength.observe

    @abstractmethod
    def limit(self) -> int:
        """Most tokens to draft in the step that begins; 0 decodes one token plainly."""

    def proceed(self, probabilities: Tensor) -> bool:
        """Asked after each drafted token with its distribution ``[vocab]`` (under greedy decoding the softmax of the
        draft's logits): draft another one?
        """
        return True

    def observe(self, step: Step) -> None:
        """Told after each step what was drafted and accepted, and how long the parts took."""
        return


class FixedLength(DraftLength):
    """Always K tokens: the least overhead, and the best rule where a workload is all alike. 0 is plain decoding."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise InputError(f"the draft length K must be 0 (plain decoding) or more, not {k}")
        self.longest = self.demanded = k
        self.name = f"K = {k}"

    def limit(self) -> int:
        return self.longest
