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
    length, strength = key.shape[-2], beta.unsqueeze(-1)
    # [B, H, 2 T, K]: state and keys are multiplied by keys and queries alike, in one product.
    both, pairs = torch.cat([key, query], -2), (2, length)
    read = None
    if state is not None:
        growth = (log_decay if length == 1 else log_decay.cumsum(-1)).exp()
        seen, read = ((both @ state).unflatten(-2, pairs) * growth[..., None, :, None]).unbind(-3)
        value = value - seen
    write = strength * value
    if length == 1:
        outputs = (query * key).sum(-1, keepdim=True) * write
    else:
        scores = (both @ key.mT).unflatten(-2, pairs) * decay_ratios(log_decay).unsqueeze(-3)
        between_keys, scores = scores.unbind(-3)
        write = torch.linalg.solve_triangular(strength * between_keys, write, upper=False, unitriangular=True)
        outputs = scores @ write
    return outputs if read is None else outputs + read, Tape(log_decay, key, write)
