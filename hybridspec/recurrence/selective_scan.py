"""Selective scan, the mixer of Mamba-1 (arXiv 2312.00752; Jamba, Zamba, Mamba, Falcon Mamba), from any initial state.

``S_t = exp(dt_t A) * S_{t-1} + (dt_t x_t) B_t^T`` and ``y_t = S_t C_t``, with a decay for each entry of the state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec.recurrence.tape import sum_from


class ScanTape(NamedTuple):
    """What a verify pass leaves behind. A decay for each entry of the state would make the tape as large as a state
    per token; its two factors are kept instead.

    ``step`` (dt) and ``scaled`` (dt x) are ``[..., I, T]``, ``write`` (B) ``[..., T, N]``, ``rate`` (A) ``[..., I,
    N]``; leading axes are free.
    """

    step: Tensor
    scaled: Tensor
    write: Tensor
    rate: Tensor

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.step.shape[-1]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return tuple(self.rate.shape)

    def part(self, start: int, stop: int) -> "ScanTape":
        """The tokens from ``start`` to before ``stop``."""
        return ScanTape(
            self.step[..., start:stop], self.scaled[..., start:stop], self.write[..., start:stop, :], self.rate
        )

    def rollback(self, state: Tensor | None, keep: int | Tensor) -> Tensor:
        """The state ``[..., I, N]`` after the first ``keep`` tokens; see :func:`hybridspec.recurrence.tape.rollback`.

        A tensor ``keep`` broadcasts against the axes before ``I``.
        """
        step, scaled, write = self.step, self.scaled, self.write
        if isinstance(keep, int):
            step, scaled, write = step[..., :keep], scaled[..., :keep], write[..., :keep, :]
        else:
            dropped = torch.arange(step.shape[-1], device=step.device) >= keep[..., None, None]
            step, scaled = step.masked_fill(dropped, 0.0), scaled.masked_fill(dropped, 0.0)
            write = write.masked_fill(dropped.mT, 0.0)
        # [..., I, T + 1, N]: what is left at the end of the state (the first of them) and of each token's write.
        left = (sum_from(step.mT).mT.unsqueeze(-1) * self.rate.unsqueeze(-2)).exp()
        added = torch.einsum("...itn,...it,...tn->...in", left[..., 1:, :], scaled, write)
        return added if state is None else added.addcmul_(state, left[..., 0, :])

    @classmethod
    def join(cls, tapes: Sequence["ScanTape"]) -> "ScanTape":
        return cls(
            torch.cat([t.step for t in tapes], -1),
            torch.cat([t.scaled for t in tapes], -1),
            torch.cat([t.write for t in tapes], -2),
            tapes[0].rate,
        )


def verify(
    inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Tensor, ScanTape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    Args:
        inputs: ``x [B, I, T]``.
        step: ``dt [B, I, T]``, positive.
        rate: ``A [I, N]``, negative.
        write: ``B [B, T, N]``.
        read: ``C [B, T, N]``.
        state: ``[B, I, N]``, or None for zeros.

    Returns:
        outputs ``[B, I, T]``, without the skip connection and the gate, and the tape.
    """
    scaled = inputs * step
    decay = (step.unsqueeze(-1) * rate.unsqueeze(-2)).exp()
    added = scaled.unsqueeze(-1) * write.unsqueeze(1)
    states, now = [], state
    for t in range(inputs.shape[-1]):
        now = added[:, :, t] if now is None else torch.addcmul(added[:, :, t], decay[:, :, t], now)
        states.append(now)
    outputs = torch.einsum("bitn,btn->bit", torch.stack(states, 2), read)
    return outputs, ScanTape(step, scaled, write, rate.expand(inputs.shape[0], *rate.shape))


def scan(
    inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """Outputs and final state of any number of tokens, ``chunk`` at a time so that memory stays bounded."""
    outputs = []
    for i in range(0, inputs.shape[-1], chunk):
        part = slice(i, i + chunk)
        block = (inputs[..., part], step[..., part], rate, write[:, part], read[:, part])
        output, tape = verify(*block, state)
        state = tape.rollback(state, tape.length)
        outputs.append(output)
    return torch.cat(outputs, -1), state
