"""Gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid): ``S_t = exp(g_t) S_{t-1} + k_t u_t^T``, ``o_t = S_t^T q_t``.

The write is ``u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)`` (Yang et al., Gated Delta Networks, arXiv 2412.06464).
Given the writes, the state after any prefix of a block is a decayed sum of rank-one terms, which is the rollback.
"""

from typing import NamedTuple

import torch
from torch import Tensor

L2_EPSILON = 1e-6


class Tape(NamedTuple):
    """What a verify pass leaves behind: enough to rebuild the state after any of its tokens.

    ``log_decay [..., H, T]``, ``key [..., H, T, K]`` and ``write [..., H, T, V]``, fp32; leading axes are free
    (batch, layers).
    """

    log_decay: Tensor
    key: Tensor
    write: Tensor


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON)


def verify(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    The writes solve ``(I + tril(diag(beta) K K^T * decay ratios, -1)) u = beta * (v - decayed K S_0)`` in one
    triangular solve: no padding to chunks, no loop over tokens. Cost grows with the square of the block, so keep it
    under about 64 tokens.

    Args:
        query, key: ``[B, H, T, K]``, normalised; the query carries its scale.
        value: ``[B, H, T, V]``.
        log_decay: ``[B, H, T]``, entries at most 0.
        beta: ``[B, H, T]``.
        state: ``[B, H, K, V]``, or None for zeros.

    Returns:
        outputs ``[B, H, T, V]`` and the tape.
    """
    total = log_decay.cumsum(-1)
    growth = total.exp().unsqueeze(-1)
    strength = beta.unsqueeze(-1)
    # A state seen by query and key alike: one product serves both.
    seen = None if state is None else growth.repeat(1, 1, 2, 1) * (torch.cat([key, query], -2) @ state)
    length = key.shape[-2]
    target = strength * (value if seen is None else value - seen[..., :length, :])
    if length == 1:
        write = target
        outputs = (query * key).sum(-1, keepdim=True) * write
    else:
        ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        scores = (torch.cat([strength * key, query], -2) @ key.mT) * ratios.repeat(1, 1, 2, 1)
        write = torch.linalg.solve_triangular(scores[..., :length, :], target, upper=False, unitriangular=True)
        outputs = scores[..., length:, :] @ write
    if seen is not None:
        outputs = outputs + seen[..., length:, :]
    return outputs, Tape(log_decay, key, write)


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
