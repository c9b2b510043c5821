"""State space duality, the mixer of Mamba-2 (arXiv 2405.21060; Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba2).

``S_t = exp(A dt_t) S_{t-1} + (dt_t x_t) B_t^T`` and ``y_t = S_t C_t``, with a scalar decay per head.
"""

from torch import Tensor

from hybridspec.recurrence.linear_attention import decayed_sum
from hybridspec.recurrence.tape import Tape


def verify(
    inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    Args:
        inputs: ``x [B, H, T, P]``.
        step: ``dt [B, H, T]``, positive.
        rate: ``A [H]``, negative.
        write: ``B [B, G, T, N]``; G divides H.
        read: ``C [B, G, T, N]``.
        state: ``[B, H, P, N]``, or None for zeros.

    Returns:
        outputs ``[B, H, T, P]``, without the skip connection, and the tape.
    """
    groups = inputs.shape[1] // write.shape[1]
    if groups > 1:
        write, read = write.repeat_interleave(groups, 1), read.repeat_interleave(groups, 1)
    log_decay = step * rate.unsqueeze(-1)
    scaled = inputs * step.unsqueeze(-1)
    outputs = decayed_sum(read, write, scaled, log_decay, None if state is None else state.mT)
    return outputs, Tape(log_decay, scaled, write)
