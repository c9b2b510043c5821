"""Kimi delta attention: the delta rule with a decay for each key channel (Kimi Linear, arXiv 2510.26692).

``S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T`` with ``u_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)``.
"""

import torch
from torch import Tensor

from hybridspec.recurrence.tape import Tape


def verify(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    The decay between two tokens differs by channel, so it is spelled out for each pair: memory and time grow with
    ``T * T * K``, which blocks of a few tokens do not feel.

    Args:
        query, key: ``[B, H, T, K]``, normalised; the query carries its scale.
        value: ``[B, H, T, V]``.
        log_decay: ``[B, H, T, K]``, entries at most 0.
        beta: ``[B, H, T]``.
        state: ``[B, H, K, V]``, or None for zeros.

    Returns:
        outputs ``[B, H, T, V]`` and the tape.
    """
    growth, strength = log_decay.cumsum(-2).exp(), beta.unsqueeze(-1)
    length = key.shape[-2]
    past = torch.ones(length, length, dtype=torch.bool, device=key.device).tril(-1)
    # [B, H, T, T, K]: the decay from the second token to the first, added up between them (see tape.sum_from). Where
    # the second comes later there is none, and neither the solve nor the outputs read those scores.
    between = log_decay.unsqueeze(-2).masked_fill(~past.unsqueeze(-1), 0.0).cumsum(-3)
    decayed_key = key.unsqueeze(-3) * between.exp()
    target = strength * (value if state is None else value - (key * growth) @ state)
    if length == 1:
        write = target
    else:
        scores = strength * torch.einsum("...tk,...tsk->...ts", key, decayed_key)
        write = torch.linalg.solve_triangular(scores, target, upper=False, unitriangular=True)
    outputs = torch.einsum("...tk,...tsk->...ts", query, decayed_key).tril() @ write
    if state is not None:
        outputs = outputs + (query * growth) @ state
    return outputs, Tape(log_decay, key, write)
