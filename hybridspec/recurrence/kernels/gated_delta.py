"""The gated delta rule of a short block as one Triton kernel.

Each program holds a tile of one head's state in registers, ``K`` by :data:`TILE` value channels, and walks through the
tokens: one read of the state whatever the length of the block, and the same order of operations as decoding. Its twin
is :func:`hybridspec.recurrence.gated_delta.verify`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridspec.recurrence.gated_delta import L2_EPSILON
from hybridspec.recurrence.tape import Tape

#: Value channels of one program. A warp keeps 128 key channels of 8 of them in registers; of 16 it spills some.
TILE = 8


def verify(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    scale: float = 1.0,
    normalise: bool = False,
    final: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tape]:
    """Outputs of a short block of tokens from ``state``, and the tape; the state itself is not advanced.

    Inputs of any float type and of any strides; what is computed and the tape are fp32.

    Args:
        query, key: ``[B, G, T, K]``; G divides H, and consecutive heads share a key head.
        value: ``[B, H, T, V]``.
        log_decay: ``[B, H, T]``, entries at most 0.
        beta: ``[B, H, T]``.
        state: ``[B, H, K, V]`` fp32, or None for zeros.
        scale: of the query, after its normalisation.
        normalise: queries and keys to length 1.
        final: where to write the state after the block, ``[B, H, K, V]`` fp32, contiguous; ``state`` itself is fine.
        dtype: of the outputs.

    Returns:
        outputs ``[B, H, T, V]`` and the tape, with the keys of each head.
    """
    batch, heads, tokens, value_size = value.shape
    key_heads, key_size = key.shape[1], key.shape[3]
    # Tokens in front of heads, as the callers want them.
    outputs = value.new_empty(batch, tokens, heads, value_size, dtype=dtype).transpose(1, 2)
    keys = value.new_empty(batch, heads, tokens, key_size, dtype=torch.float32)
    writes = value.new_empty(batch, heads, tokens, value_size, dtype=torch.float32)
    log_decay = log_decay.float()
    state = None if state is None else state.contiguous()
    grid = (triton.cdiv(value_size, TILE), batch * heads)
    with torch.cuda.device_of(value):
        _verify[grid](
            query,
            key,
            value,
            log_decay,
            beta,
            keys if state is None else state,
            outputs,
            keys,
            writes,
            keys if final is None else final,
            tokens,
            heads,
            heads // key_heads,
            key_size,
            value_size,
            scale,
            *query.stride(),
            *key.stride(),
            *value.stride(),
            *log_decay.stride(),
            *beta.stride(),
            *outputs.stride(),
            HAS_STATE=state is not None,
            HAS_FINAL=final is not None,
            NORMALISE=normalise,
            EPSILON=L2_EPSILON,
            BLOCK_K=triton.next_power_of_2(key_size),
            BLOCK_V=TILE,
            num_warps=max(1, triton.next_power_of_2(key_size) // 128),
        )
    return outputs, Tape(log_decay, keys, writes)


@triton.jit
def _verify(
    query,
    key,
    value,
    log_decay,
    beta,
    state,
    outputs,
    tape_key,
    tape_write,
    final,
    tokens,
    heads,
    heads_per_key,
    key_size,
    value_size,
    scale,
    query_b,
    query_h,
    query_t,
    query_k,
    key_b,
    key_h,
    key_t,
    key_k,
    value_b,
    value_h,
    value_t,
    value_v,
    decay_b,
    decay_h,
    decay_t,
    beta_b,
    beta_h,
    beta_t,
    out_b,
    out_h,
    out_t,
    out_v,
    HAS_STATE: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b = row // heads
    h = row % heads
    k = tl.arange(0, BLOCK_K)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = k < key_size
    in_v = v < value_size
    tile = row * key_size * value_size + k[:, None] * value_size + v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    if HAS_STATE:
        s = tl.load(state + tile, mask=in_tile, other=0.0).to(tl.float32)
    else:
        s = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    query += b * query_b + (h // heads_per_key) * query_h + k * query_k
    key += b * key_b + (h // heads_per_key) * key_h + k * key_k
    value += b * value_b + h * value_h + v * value_v
    log_decay += b * decay_b + h * decay_h
    beta += b * beta_b + h * beta_h
    outputs += b * out_b + h * out_h + v * out_v
    tape_key += row * tokens * key_size + k
    tape_write += row * tokens * value_size + v
    for t in range(0, tokens):
        k_t = tl.load(key + t * key_t, mask=in_k, other=0.0).to(tl.float32)
        q_t = tl.load(query + t * query_t, mask=in_k, other=0.0).to(tl.float32)
        v_t = tl.load(value + t * value_t, mask=in_v, other=0.0).to(tl.float32)
        g_t = tl.load(log_decay + t * decay_t).to(tl.float32)
        b_t = tl.load(beta + t * beta_t).to(tl.float32)
        if NORMALISE:
            k_t = k_t * tl.rsqrt(tl.sum(k_t * k_t, 0) + EPSILON)
            q_t = q_t * tl.rsqrt(tl.sum(q_t * q_t, 0) + EPSILON)
        q_t = q_t * scale
        s = s * tl.exp(g_t)
        u_t = b_t * (v_t - tl.sum(s * k_t[:, None], 0))
        s = s + k_t[:, None] * u_t[None, :]
        o_t = tl.sum(s * q_t[:, None], 0)
        tl.store(outputs + t * out_t, o_t.to(outputs.dtype.element_ty), mask=in_v)
        tl.store(tape_write + t * value_size, u_t, mask=in_v)
        if part == 0:
            tl.store(tape_key + t * key_size, k_t, mask=in_k)
    if HAS_FINAL:
        tl.store(final + tile, s, mask=in_tile)
