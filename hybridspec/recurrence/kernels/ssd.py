"""State space duality (Mamba-2) of a short block as one Triton kernel.

Each program holds a tile of one head's state in registers, :data:`TILE` channels by ``N``, and walks through the
tokens: one read of the state whatever the length of the block. Its twin is :func:`hybridspec.recurrence.ssd.verify`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridspec.recurrence.tape import Tape

#: Channels of a head in one program. A warp that holds a state of 128 for each of them keeps all in registers.
TILE = 8


def verify(
    inputs: Tensor,
    step: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    state: Tensor | None,
    *,
    final: Tensor | None = None,
) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    Inputs of any float type and of any strides; what is computed, the outputs and the tape are fp32.

    Args:
        inputs: ``x [B, H, T, P]``.
        step: ``dt [B, H, T]``, positive.
        rate: ``A [H]``, negative.
        write: ``B [B, G, T, N]``; G divides H.
        read: ``C [B, G, T, N]``.
        state: ``[B, H, P, N]`` fp32, or None for zeros.
        final: where to write the state after the block, ``[B, H, P, N]`` fp32, contiguous; ``state`` itself is fine.

    Returns:
        outputs ``[B, H, T, P]``, without the skip connection, and the tape, with the writes of each head.
    """
    batch, heads, tokens, size = inputs.shape
    groups, state_size = write.shape[1], write.shape[3]
    # Tokens in front of heads, as the callers want them.
    outputs = inputs.new_empty(batch, tokens, heads, size, dtype=torch.float32).transpose(1, 2)
    scaled = inputs.new_empty(batch, heads, tokens, size, dtype=torch.float32)
    writes = inputs.new_empty(batch, heads, tokens, state_size, dtype=torch.float32)
    log_decay = inputs.new_empty(batch, heads, tokens, dtype=torch.float32)
    state = None if state is None else state.contiguous()
    grid = (triton.cdiv(size, TILE), batch * heads)
    with torch.cuda.device_of(inputs):
        _verify[grid](
            inputs,
            step,
            rate,
            write,
            read,
            scaled if state is None else state,
            outputs,
            log_decay,
            scaled,
            writes,
            scaled if final is None else final,
            tokens,
            heads,
            heads // groups,
            size,
            state_size,
            *inputs.stride(),
            *step.stride(),
            *rate.stride(),
            *write.stride(),
            *read.stride(),
            *outputs.stride(),
            HAS_STATE=state is not None,
            HAS_FINAL=final is not None,
            BLOCK_P=TILE,
            BLOCK_N=triton.next_power_of_2(state_size),
            num_warps=max(1, triton.next_power_of_2(state_size) // 128),
        )
    return outputs, Tape(log_decay, scaled, writes)


@triton.jit
def _verify(
    inputs,
    step,
    rate,
    write,
    read,
    state,
    outputs,
    tape_decay,
    tape_scaled,
    tape_write,
    final,
    tokens,
    heads,
    heads_per_group,
    size,
    state_size,
    inputs_b,
    inputs_h,
    inputs_t,
    inputs_p,
    step_b,
    step_h,
    step_t,
    rate_h,
    write_b,
    write_g,
    write_t,
    write_n,
    read_b,
    read_g,
    read_t,
    read_n,
    out_b,
    out_h,
    out_t,
    out_p,
    HAS_STATE: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b = row // heads
    h = row % heads
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p = p < size
    in_n = n < state_size
    tile = row * size * state_size + p[:, None] * state_size + n[None, :]
    in_tile = in_p[:, None] & in_n[None, :]
    if HAS_STATE:
        s = tl.load(state + tile, mask=in_tile, other=0.0).to(tl.float32)
    else:
        s = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    a = tl.load(rate + h * rate_h).to(tl.float32)
    inputs += b * inputs_b + h * inputs_h + p * inputs_p
    step += b * step_b + h * step_h
    write += b * write_b + (h // heads_per_group) * write_g + n * write_n
    read += b * read_b + (h // heads_per_group) * read_g + n * read_n
    outputs += b * out_b + h * out_h + p * out_p
    tape_decay += row * tokens
    tape_scaled += row * tokens * size + p
    tape_write += row * tokens * state_size + n
    for t in range(0, tokens):
        x_t = tl.load(inputs + t * inputs_t, mask=in_p, other=0.0).to(tl.float32)
        dt_t = tl.load(step + t * step_t).to(tl.float32)
        b_t = tl.load(write + t * write_t, mask=in_n, other=0.0).to(tl.float32)
        c_t = tl.load(read + t * read_t, mask=in_n, other=0.0).to(tl.float32)
        g_t = dt_t * a
        x_t = x_t * dt_t
        s = s * tl.exp(g_t) + x_t[:, None] * b_t[None, :]
        o_t = tl.sum(s * c_t[None, :], 1)
        tl.store(outputs + t * out_t, o_t, mask=in_p)
        tl.store(tape_scaled + t * size, x_t, mask=in_p)
        if part == 0:
            tl.store(tape_write + t * state_size, b_t, mask=in_n)
            tl.store(tape_decay + t, g_t)
    if HAS_FINAL:
        tl.store(final + tile, s, mask=in_tile)
