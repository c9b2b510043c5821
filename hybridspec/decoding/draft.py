"""What every draft strategy is: something that sees committed tokens and proposes the next few."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling

if TYPE_CHECKING:
    # Commands that only read options need no model library.
    from hybridspec.runtime.runner import TargetRunner
    from hybridspec.runtime.session import Session

#: Asked after each drafted token with the distribution ``[vocab]`` that it was chosen from: draft another one?
Proceed = Callable[[Tensor], bool]


class Drafting(ABC):
    """A draft strategy at work on one sequence. Use it as a context manager: it frees its state on every way out."""

    @abstractmethod
    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        """At most ``k`` tokens (``k`` at least 1) to follow the committed ones.

        A strategy that drafts token by token asks ``proceed`` after each and stops when it says no; the token just
        drafted stays in the block either way, so that sampling stays exact.
        """

    @abstractmethod
    def accept(self, accepted: int, token: int) -> None:
        """Told after each verification: the first ``accepted`` proposed tokens stay and ``token`` follows them.

        Also called with ``accepted`` 0 after a step in which nothing was asked for.
        """

    @abstractmethod
    def snapshot(self) -> object:
        """A mark of the present position, taken between steps."""

    @abstractmethod
    def restore(self, mark: object) -> None:
        """Returns to a mark of this sequence, any number of times."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the sequence holds."""

    def __enter__(self) -> "Drafting":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Draft(ABC):
    """A draft strategy: an instance is set up once and starts a :class:`Drafting` for each sequence."""

    #: Name in tables and profiles.
    name: str
    #: Whether its distributions tell how sure it is. If not, rules that look at them never stop it.
    has_doubts = True
    #: Whether it reads the target's session (hidden states, cache), and so cannot serve a target in another engine.
    reads_target = False

    @classmethod
    def create(cls, target: "TargetRunner", **options: object) -> "Draft":
        """Makes the strategy for ``target`` from options as they stand on a command line."""
        return cls(**options)

    def check_pair(self, target: "TargetRunner") -> None:
        """Raises :class:`~hybridspec.errors.IncompatiblePairError` if this draft cannot serve ``target``."""
        return

    @abstractmethod
    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: "Session | None" = None,
    ) -> Drafting:
        """Opens a sequence.

        Args:
            sampling, generator: those of the target.
            target: the target's session, before it is fed the prompt: a strategy that reads the target's hidden states
                or its cache attaches itself here. None where the target runs elsewhere, in a serving engine.
        """
