"""How the target passes over a block: in one pass, or as somebody else has it."""

from abc import ABC, abstractmethod

from torch import Tensor

from hybridspec.decoding.proposal import Proposal
from hybridspec.runtime.session import Session


class Verifier(ABC):
    """Feeds a block to the target's session. The loop calls it once in each step."""

    @abstractmethod
    def verify(self, session: Session, last: int, proposal: Proposal) -> tuple[Tensor, Proposal]:
        """Verifies ``[last, *proposal.tokens]``.

        Returns:
            logits ``[n + 1, vocab]`` and the first n drafted tokens, those that acceptance may judge, with the
            distributions that they count as drawn from. n + 1 tokens are pending in the session then.
        """


class WholeBlock(Verifier):
    """One pass over the block."""

    def verify(self, session: Session, last: int, proposal: Proposal) -> tuple[Tensor, Proposal]:
        return session.verify([last, *proposal.tokens]), proposal
