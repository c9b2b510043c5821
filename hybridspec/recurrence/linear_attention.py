"""Decayed linear attention, ``S_t = exp(g_t) S_{t-1} + k_t v_t^T`` and ``o_t = S_t^T q_t``: what is written does not
depend on the state.

Lightning attention (MiniMax-01, arXiv 2501.08313) has a fixed decay per head; SSD (:mod:`.ssd`) is the same with
other names.
"""

from torch import Tensor

from hybridspec.recurrence.tape import Tape, decay_ratios


def decayed_sum(query: Tensor, key: Tensor, write: Tensor, log_decay: Tensor, state: Tensor | None) -> Tensor:
    """Outputs ``[B, H, T, V]`` of a short block: queries and keys ``[B, H, T, K]``, writes ``[B, H, T, V]``,
    ``log_decay [B, H, T]``, ``state [B, H, K, V]`` or None for zeros.
    """
    if key.shape[-2] == 1:
        outputs = (query * key).sum(-1, keepdim=True) * write
    else:
        outputs = ((query @ key.mT) * decay_ratios(log_decay)) @ write
    return outputs if state is None else outputs + log_decay.cumsum(-1).exp().unsqueeze(-1) * (query @ state)


def verify(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    Args:
        query, key: ``[B, H, T, K]``.
        value: ``[B, H, T, V]``.
        log_decay: ``[B, H, T]``, entries at most 0.
        state: ``[B, H, K, V]``, or None for zeros.

    Returns:
        outputs ``[B, H, T, V]`` and the tape.
    """
    return decayed_sum(query, key, value, log_decay, state), Tape(log_decay, key, value)
