"""Faster CPU training for Qwen3.5 text models: the same mathematics as transformers' torch fallbacks, fewer passes.

One triangular inverse by doubling replaces the LAPACK solves of the chunked gated delta rule, the causal convolution
is a sum of shifted products, and the norms use the fused operator. Only training without a cache is served.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

CHUNK = 32


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Gated delta rule over whole sequences from a zero state; shapes as in transformers, ``T`` a multiple of 32."""
    batch, length, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[-2:]
    if initial_state is not None or output_final_state or length % CHUNK:
        raise ValueError(f"the training kernel takes no state and lengths in multiples of {CHUNK}, not {length}")
    if key_heads != heads:
        query, key = (x.repeat_interleave(heads // key_heads, 2) for x in (query, key))
    chunks = length // CHUNK
    query, key, value = (x.transpose(1, 2).reshape(batch, heads, chunks, CHUNK, -1) for x in (query, key, value))
    beta = beta.transpose(1, 2).reshape(batch, heads, chunks, CHUNK, 1)
    g = g.transpose(1, 2).reshape(batch, heads, chunks, CHUNK).cumsum(-1)
    query = query * (torch.rsqrt((query * query).sum(-1, keepdim=True) + 1e-6) * key_dim**-0.5)
    key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    key_t = key.transpose(-1, -2)
    weighted_key = key * beta
    power = -((weighted_key @ key_t) * decay).tril(-1)
    # (I - L)^-1 = (I + L)(I + L^2)(I + L^4)...: L is nilpotent.
    inverse = power + torch.eye(CHUNK, device=g.device)
    reach = 1
    while 2 * reach < CHUNK:
        power = power @ power
        inverse = inverse + power @ inverse
        reach *= 2
    growth = g.exp().unsqueeze(-1)
    solved = inverse @ torch.cat([value * beta, weighted_key * growth], -1)
    fresh, seen = solved.split([value_dim, key_dim], -1)
    inner = (query @ key_t) * decay
    query = query * growth
    last = g[..., -1:]
    key_out = (key * (last - g).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = last.exp().unsqueeze(-1)
    across = _across_chunks if chunks <= 16 else _across_chunks_eager
    outputs = across(query, inner, fresh, seen, key_out, chunk_decay)
    return outputs.reshape(batch, heads, length, value_dim).transpose(1, 2), None


def _across_chunks(
    query: Tensor, inner: Tensor, fresh: Tensor, seen: Tensor, key_out: Tensor, chunk_decay: Tensor
) -> Tensor:
    """Carries the state from chunk to chunk; all ``[B, H, chunks, ...]``."""
    state = torch.zeros(*query.shape[:2], query.shape[-1], fresh.shape[-1], device=query.device)
    outputs = []
    for i in range(query.shape[2]):
        written = fresh[:, :, i] - seen[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + inner[:, :, i] @ written)
        state = state * chunk_decay[:, :, i] + key_out[:, :, i] @ written
    return torch.stack(outputs, 2)


# Compiled, the loop is unrolled, and 64 chunks take minutes to compile for a gain nobody notices.
_across_chunks_eager = torch.compiler.disable(_across_chunks)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu", **_: object
) -> Tensor:
    """Depthwise causal convolution of ``x [B, C, T]`` with ``weight [C, kernel]`` and SiLU."""
    kernel, length = weight.shape[-1], x.shape[-1]
    padded = F.pad(x, (kernel - 1, 0))
    y = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(kernel))
    return F.silu(y if bias is None else y + bias[:, None])


def _norm(self: torch.nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), 1.0 + self.weight, self.eps)


def _gated_norm(self: torch.nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon) * F.silu(gate)


REPLACED = [
    (modeling, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    (modeling, "causal_conv1d_fn", causal_conv1d),
    (modeling.Qwen3_5RMSNorm, "forward", _norm),
    (modeling.Qwen3_5RMSNormGated, "forward", _gated_norm),
]
NATIVE = [(owner, name, getattr(owner, name)) for owner, name, _ in REPLACED]


@contextmanager
def _swapped(functions: list[tuple[object, str, Callable]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    try:
        for owner, name, function in functions:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def training_kernels() -> AbstractContextManager[None]:
    """Swaps the faster functions in while the block runs."""
    return _swapped(REPLACED)


def native_kernels() -> AbstractContextManager[None]:
    """Swaps transformers' own functions back in, for decoding with a cache inside a training block."""
    return _swapped(NATIVE)
