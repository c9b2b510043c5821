"""The tape: what a verify pass leaves behind, and the closed-form rollback from it.

The state after the first n tokens of a block is ``S_n = D_n S_0 + sum_{j<=n} (D_n / D_j) k_j u_j^T``, with ``D_n``
the product of the decays: a decayed sum of rank-one terms that needs neither a second forward pass nor a state per
token.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

AnyTape = TypeVar("AnyTape", bound=tuple)


def sum_from(x: Tensor) -> Tensor:
    """Sums to the end of ``[..., T, C]``, ``[..., T + 1, C]``: of all tokens, of those after the first, ..., of none.

    Added up from the end: as a difference of two sums from the start, a small decay that follows a strong one would be
    lost in rounding.
    """
    return F.pad(x, (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def decay_ratios(log_decay: Tensor) -> Tensor:
    """``D_t / D_s``, what is left at token t (rows) of a write at token s (columns): ``[..., T, T]`` from ``[...,
    T]``; 0 where s follows t. Added up between the two, see :func:`sum_from`.
    """
    between = log_decay.unsqueeze(-1).expand(*log_decay.shape, log_decay.shape[-1]).tril(-1).cumsum(-2)
    return between.exp().tril()


class Tape(NamedTuple):
    """What a verify pass leaves behind: enough to rebuild the state after any of its tokens.

    ``log_decay [..., H, T]`` or, with a decay for each key channel, ``[..., H, T, K]``; ``key [..., H, T, K]`` and
    ``write [..., H, T, V]``, fp32; leading axes are free (batch, layers).
    """

    log_decay: Tensor
    key: Tensor
    write: Tensor

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.key.shape[-2]

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (*self.key.shape[:-2], self.key.shape[-1], self.write.shape[-1])

    def part(self, start: int, stop: int) -> "Tape":
        """The tokens from ``start`` to before ``stop``."""
        channelwise = self.log_decay.ndim == self.key.ndim
        log_decay = self.log_decay[..., start:stop, :] if channelwise else self.log_decay[..., start:stop]
        return Tape(log_decay, self.key[..., start:stop, :], self.write[..., start:stop, :])

    def rollback(self, state: Tensor | None, keep: int | Tensor) -> Tensor:
        """See :func:`rollback`."""
        channelwise = self.log_decay.ndim == self.key.ndim
        log_decay = self.log_decay if channelwise else self.log_decay.unsqueeze(-1)
        key, write = self.key, self.write
        if isinstance(keep, int):
            log_decay, key, write = log_decay[..., :keep, :], key[..., :keep, :], write[..., :keep, :]
        else:
            dropped = (torch.arange(key.shape[-2], device=key.device) >= keep[..., None, None]).unsqueeze(-1)
            log_decay, key, write = (x.masked_fill(dropped, 0.0) for x in (log_decay, key, write))
        if key.shape[-2] == 1:
            return key.mT * write if state is None else (state * log_decay.exp().mT).addcmul_(key.mT, write)
        kept, left = sum_from(log_decay).exp().tensor_split([1], -2)
        key = (key * left).mT
        if state is None:
            return key @ write
        after = state * kept.mT
        # Added in place: a product of its own would be one more plane to write and to read.
        return after.flatten(0, -3).baddbmm_(key.flatten(0, -3), write.flatten(0, -3)).view_as(after)

    @classmethod
    def join(cls, tapes: Sequence["Tape"]) -> "Tape":
        time = -2 if tapes[0].log_decay.ndim == tapes[0].key.ndim else -1
        return cls(
            torch.cat([t.log_decay for t in tapes], time),
            torch.cat([t.key for t in tapes], -2),
            torch.cat([t.write for t in tapes], -2),
        )


def rollback(state: Tensor | None, tape: AnyTape, keep: int | Tensor) -> Tensor:
    """The state after the first ``keep`` tokens of the tape: ``S_n = D_n S_0 + sum_j (D_n / D_j) k_j u_j^T``.

    Args:
        state: ``[..., H, K, V]`` before the tape's first token, or None for zeros. Not modified.
        tape: a :class:`Tape`, or another family's that has the same methods.
        keep: one count for all rows, or an integer tensor that broadcasts against the tape's axes before ``H``,
            so that each row of a batch keeps its own number of tokens.
    """
    return tape.rollback(state, keep)


def join(tapes: Sequence[AnyTape]) -> AnyTape:
    """One tape of consecutive blocks, in order."""
    return tapes[0] if len(tapes) == 1 else type(tapes[0]).join(tapes)


def stack(tapes: Sequence[AnyTape], axis: int = 0) -> AnyTape:
    """One tape of many layers (a new leading axis) or of many groups of heads (``axis`` 1)."""
    return type(tapes[0])(*(torch.stack(parts, axis) for parts in zip(*tapes, strict=True)))
