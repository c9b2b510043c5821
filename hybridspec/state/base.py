"""What a sequence holds, whichever way it takes tokens back: the verbs that a session knows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hybridspec.state.block import Block, Paths
from hybridspec.state.memory import recurrent_bytes
from hybridspec.state.pass_context import Purpose


class PassOutput(NamedTuple):
    """What a model returns: ``logits [B, T, vocab]``, or of the last token only, and its own cache after the pass."""

    logits: Tensor
    cache: Any = None


class Forward(Protocol):
    """Runs the model once: the side of a pass that a cache does not know.

    Attributes:
        observed: somebody looks into the pass from Python, so it must run as it stands.
    """

    @property
    def observed(self) -> bool: ...

    def __call__(self, cache: Any, block: Block, last_only: bool = False) -> PassOutput: ...


class SequenceCache(ABC):
    """The past of one sequence: committed tokens, and pending ones that a commit keeps or takes back.

    Whatever fails inside one of these, an interrupt too, leaves the committed tokens intact once :meth:`abort` has run.

    Attributes:
        pending: tokens that were fed since the last commit.
    """

    pending: int

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed tokens."""

    @abstractmethod
    def feed(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        """Runs a block, whose tokens are pending then.

        Returns:
            logits ``[B, T, vocab]``, or ``[B, 1, vocab]`` of the last token for the purpose ``prefill``. A pass that
            was cut short gives fewer rows, and only their tokens are pending.
        """

    def advance(self, block: Block, forward: Forward) -> None:
        """Runs and commits a long block of a prompt, by the model's own many-token form where that is exact."""
        self.feed(block, "prefill", forward)
        self.commit([range(block.width)] * len(block.lengths), forward)

    @abstractmethod
    def commit(self, paths: Paths, forward: Forward | None = None) -> None:
        """Keeps the pending tokens that ``paths`` names and takes the others back.

        Args:
            forward: runs kept tokens again, where nothing else rebuilds the state after them.

        Raises:
            SessionError: a path names tokens that are not pending, or that this cache cannot keep alone.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drops everything pending, also after a forward pass or a commit that failed half way."""

    @abstractmethod
    def snapshot(self) -> object:
        """A mark of the committed position, protected from being written over.

        Raises:
            SessionError: tokens are pending.
        """

    @abstractmethod
    def is_at(self, mark: object) -> bool:
        """Whether the committed position is that of ``mark``."""

    @abstractmethod
    def restore(self, mark: object) -> None:
        """Returns to a mark; pending tokens are dropped."""

    @abstractmethod
    def recurrent_states(self) -> list[Tensor]:
        """First recurrent state of each layer that shows one, after all fed tokens that are in it."""

    @property
    def recurrent_bytes(self) -> int:
        """Bytes that recurrent states and convolution windows take now, with whatever pending tokens add to them (a
        tape, a state per token, or a copy of the cache). Keys and values of attention do not count.
        """
        return recurrent_bytes([self])


def states_of(layers: Iterable[object]) -> list[Tensor]:
    """First recurrent state of each cache layer that has one."""
    states = [getattr(layer, "recurrent_states", {}).get(0) for layer in layers]
    return [state for state in states if state is not None]
