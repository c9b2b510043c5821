"""RG-LRU, the recurrence of Griffin (arXiv 2402.19427; RecurrentGemma): ``h_t = a_t * h_{t-1} + x_t`` for each channel.

``a_t`` in [0, 1] is the recurrence gate, 0 where a sequence starts anew; ``x_t`` the gated input, already scaled by
``sqrt(1 - a_t^2)``. The state is a vector, and the outputs are the states: the rollback picks one of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateTape(NamedTuple):
    """What a verify pass leaves behind: ``states [..., T, W]`` after each token, fp32; leading axes are free.

    Half as large as decays and inputs, and no logarithm of a decay that may be 0.
    """

    states: Tensor

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.states.shape[-2]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (*self.states.shape[:-2], self.states.shape[-1])

    def part(self, start: int, stop: int) -> "StateTape":
        """The tokens from ``start`` to before ``stop``."""
        return StateTape(self.states[..., start:stop, :])

    def rollback(self, state: Tensor | None, keep: int | Tensor) -> Tensor:
        """The state ``[..., W]`` after the first ``keep`` tokens; see :func:`hybridspec.recurrence.tape.rollback`.

        A tensor ``keep`` broadcasts against the axes before ``T``.
        """
        before = torch.zeros_like(self.states[..., 0, :]) if state is None else state
        if isinstance(keep, int):
            # Copied out of the block, so that a kept state does not hold all the others.
            return self.states[..., keep - 1, :].clone() if keep else before
        index = (keep - 1).clamp(min=0)[..., None, None]
        return torch.where(keep.unsqueeze(-1) > 0, torch.take_along_dim(self.states, index, -2).squeeze(-2), before)

    @classmethod
    def join(cls, tapes: Sequence["StateTape"]) -> "StateTape":
        return cls(torch.cat([t.states for t in tapes], -2))


def verify(inputs: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, StateTape]:
    """Outputs of a block of tokens from ``state``, and the tape; the state itself is not advanced.

    Args:
        inputs: ``x [B, T, W]``, gated and scaled.
        decay: ``a [B, T, W]``, in [0, 1].
        state: ``[B, W]``, or None for zeros.

    Returns:
        outputs ``[B, T, W]`` and the tape.
    """
    states, now = [], state
    for x, a in zip(inputs.unbind(1), decay.unbind(1), strict=True):
        now = x if now is None else torch.addcmul(x, a, now)
        states.append(now)
    outputs = torch.stack(states, 1)
    return outputs, StateTape(outputs)
