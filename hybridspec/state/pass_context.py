"""The pass that is running while one of our sessions records it: its block, the tapes that it leaves behind, and which
layer they belong to.

transformers hands a mixer's state to its recurrence function without saying whose it is. The dictionaries that the
cache layers keep their states in note every read, so the function that runs next knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hybridspec.state.block import Block

#: ``verify``: a block whose tokens may be taken back. ``prefill``: the same, with the quirks of a model's many-token
#: path (clamped time steps). ``advance``: a long chunk that is kept, without a tape.
Purpose = Literal["verify", "prefill", "advance"]


class States(dict):
    """Recurrent states of one layer by index, and the tapes that the pass in progress has left for them."""

    def __init__(self, count: int) -> None:
        super().__init__(dict.fromkeys(range(count)))
        self.tapes: list[Any] = []
        #: Where a kernel may write the state after the block, if it can; see :meth:`PassContext.take_final`.
        self.final: Tensor | None = None

    def __getitem__(self, index: int) -> Tensor | None:
        now = current.get()
        if now is not None:
            now.states = self
        return self.get(index)


class Windows(dict):
    """Convolution windows of one layer by index; during a pass they grow by its inputs."""

    def __init__(self, count: int) -> None:
        super().__init__(dict.fromkeys(range(count)))
        self.kernels: dict[int, int] = dict.fromkeys(range(count), 0)

    def __getitem__(self, index: int) -> Tensor | None:
        now = current.get()
        if now is not None:
            now.window = (self, index)
        return self.get(index)

    def append(self, index: int, inputs: Tensor, kernel: int, fill: int = 0) -> Tensor:
        """Adds ``[B, ..., T]`` inputs and returns the last ``kernel + T`` columns; an empty window holds ``fill``."""
        window = self.get(index)
        if window is None:
            self.kernels[index] = kernel
            window = inputs.new_full((*inputs.shape[:-1], kernel), fill)
        grown = torch.cat([window, inputs], -1)
        self[index] = grown
        return grown[..., -self.kernels[index] - inputs.shape[-1] :]


@dataclass
class PassContext:
    """One forward pass of one session.

    Attributes:
        block: what passes; None where transformers' own ``generate`` runs the model.
    """

    purpose: Purpose
    block: Block | None = None
    #: States and window that were read last: they belong to the mixer that is running.
    states: States | None = None
    window: tuple[Windows, int] | None = None
    #: Tapes that no layer has claimed yet.
    tapes: list[Any] = field(default_factory=list)

    def take_final(self) -> Tensor | None:
        """The place for the state after the block, once: who takes it must write it."""
        if self.states is None:
            return None
        final, self.states.final = self.states.final, None
        return final

    def claim(self) -> list[Any]:
        tapes, self.tapes, self.states = self.tapes, [], None
        return tapes


current: ContextVar[PassContext | None] = ContextVar("hybridspec_recording", default=None)


@contextmanager
def recording(purpose: Purpose = "verify", block: Block | None = None) -> Iterator[PassContext]:
    """While it is open, wrapped recurrences serve a rollback cache (in this thread or task only)."""
    now = PassContext(purpose, block)
    token = current.set(now)
    try:
        yield now
    finally:
        current.reset(token)
