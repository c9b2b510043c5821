"""The tape: what a verify pass leaves behind, and the closed-form rollback from it.

The state after the first n tokens of a block is ``S_n = D_n S_0 + sum_{j<=n} (D_n / D_j) k_j u_j^T``, with ``D_n``
the product of the decays: a decayed sum of rank-one terms that needs neither a second forward pass nor a state per
token.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tape(NamedTuple):
    """What a verify pass leaves behind: enough to rebuild the state after any of its tokens.

    ``log_decay [..., H, T]``, ``key [..., H, T, K]`` and ``write [..., H, T, V]``, fp32; leading axes are free
    (batch, layers).
    """

    log_decay: Tensor
    key: Tensor
    write: Tensor

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.key.shape[-2]


def rollback(state: Tensor | None, tape: Tape, keep: int | Tensor) -> Tensor:
    """The state after the first ``keep`` tokens of the tape: ``S_n = D_n S_0 + sum_j (D_n / D_j) k_j u_j^T``.

    Args:
        state: ``[..., H, K, V]`` before the tape's first token, or None for zeros. Not modified.
        keep: one count for all rows, or an integer tensor that broadcasts against the tape's axes before ``H``,
            so that each row of a batch keeps its own number of tokens.
    """
    if isinstance(keep, int):
        log_decay, key, write = tape.log_decay[..., :keep], tape.key[..., :keep, :], tape.write[..., :keep, :]
    else:
        kept = torch.arange(tape.key.shape[-2], device=tape.key.device) < keep[..., None, None]
        log_decay = tape.log_decay.masked_fill(~kept, 0.0)
        key, write = tape.key * kept.unsqueeze(-1), tape.write
    total = log_decay.cumsum(-1)
    end = total[..., -1:] if total.shape[-1] else total.new_zeros(*total.shape[:-1], 1)
    decayed_key = key * (end - total).exp().unsqueeze(-1)
    added = decayed_key.mT @ write
    return added if state is None else torch.addcmul(added, state, end.exp().unsqueeze(-1))


def join(tapes: list[Tape]) -> Tape:
    """One tape of consecutive blocks, in order."""
    if len(tapes) == 1:
        return tapes[0]
    return Tape(
        torch.cat([t.log_decay for t in tapes], -1),
        torch.cat([t.key for t in tapes], -2),
        torch.cat([t.write for t in tapes], -2),
    )


def stack(tapes: list[Tape]) -> Tape:
    """One tape of many layers, the layers as a new leading axis."""
    return Tape(*(torch.stack(parts) for parts in zip(*tapes, strict=True)))
