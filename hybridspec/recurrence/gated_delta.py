"""Gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid): ``S_t = exp(g_t) S_{t-1} + k_t u_t^T``, ``o_t = S_t^T q_t``.

The write is ``u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)`` (Yang et al., Gated Delta Networks, arXiv 2412.06464).
Given the writes, the state after any prefix of a block is a decayed sum of rank-one terms, which is the rollback.
"""

import torch
from torch import Tensor

from hybridspec.recurrence.tape import Tape, decay_ratios

L2_EPSILON = 1e-6


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
    growth = log_decay.cumsum(-1).exp().unsqueeze(-1)
    strength = beta.unsqueeze(-1)
    # A state seen by query and key alike: one product serves both.
    seen = None if state is None else growth.repeat(1, 1, 2, 1) * (torch.cat([key, query], -2) @ state)
    length = key.shape[-2]
    target = strength * (value if seen is None else value - seen[..., :length, :])
    if length == 1:
        write = target
        outputs = (query * key).sum(-1, keepdim=True) * write
    else:
        scores = (torch.cat([strength * key, query], -2) @ key.mT) * decay_ratios(log_decay).repeat(1, 1, 2, 1)
        write = torch.linalg.solve_triangular(scores[..., :length, :], target, upper=False, unitriangular=True)
        outputs = scores[..., length:, :] @ write
    if seen is not None:
        outputs = outputs + seen[..., length:, :]
    return outputs, Tape(log_decay, key, write)
