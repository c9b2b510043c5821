"""Every drafting step of a text in one pass, for training bridges and for measuring them.

The text is cut into blocks. A token of a block sees the target's keys and values before the block, and the reduced
model's own inside it: what it would see as the i-th token of a draft. One attention mask over both gives all blocks at
once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hybridspec.drafts.full_attention.reduced import ReducedModel, hidden
from hybridspec.runtime.model_facts import decoder_layers
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from hybridspec.state.pass_context import recording


@dataclass(frozen=True)
class Truth:
    """What the target makes of token ids ``[B, T]``.

    Attributes:
        logits: ``[B, T, vocab]``.
        cuts: hidden states ``[B, T, d]`` before and after each run of layers that the reduced model leaves out.
        keys_values: of each layer that it keeps, ``[B, H, T, d]``.
    """

    logits: Tensor
    cuts: list[tuple[Tensor, Tensor]]
    keys_values: dict[int, tuple[Tensor, Tensor]]


class _Beside(DynamicLayer):
    """Hands out the target's keys and values of all positions, and the reduced model's own behind them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.theirs = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        ours = zip(self.theirs, (key_states, value_states), strict=True)
        keys, values = (torch.cat([x, y], -2) for x, y in ours)
        return keys, values


@torch.no_grad()
def target_pass(reduced: ReducedModel, ids: Tensor) -> Truth:
    """The target's own pass over ``ids [B, T]`` from the start of a sequence."""
    cache = RollbackCache(reduced.target.config)
    with recording("advance"):
        logits, cuts = _run(reduced, reduced.target, cache, ids)
    layers = {i: cache.layers[i] for i in reduced.cut.kept}
    length = ids.shape[1]
    keys_values = {i: (x.buffer.keys[..., :length, :], x.buffer.values[..., :length, :]) for i, x in layers.items()}
    return Truth(logits, cuts, keys_values)


def draft_pass(
    reduced: ReducedModel, ids: Tensor, truth: Truth, block: int, first: int = 0
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits ``[B, T, vocab]`` and :attr:`Truth.cuts` as drafts of ``block`` tokens would have them.

    Args:
        first: where the first whole block starts; a shorter one may come before it.
    """
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)
    start = (positions - first) // block
    same = start.unsqueeze(1) == start.unsqueeze(0)
    causal = positions.unsqueeze(1) >= positions.unsqueeze(0)
    allowed = torch.cat([causal & ~same, causal & same], 1)
    dtype = reduced.target.model.dtype
    mask = torch.zeros(1, 1, length, 2 * length, dtype=dtype, device=ids.device)
    mask = mask.masked_fill(~allowed, torch.finfo(dtype).min).expand(len(ids), -1, -1, -1)
    cache = RollbackCache(reduced.target.config)
    for index, (keys, values) in truth.keys_values.items():
        cache.layers[index] = _Beside(keys, values)
    with reduced.context(ids):
        return _run(reduced, reduced.runner, cache, ids, mask)


def alone_pass(reduced: ReducedModel, ids: Tensor) -> Tensor:
    """Logits ``[B, T, vocab]`` of the reduced model without any help: on its own keys and values throughout."""
    with reduced.context(ids):
        return _run(reduced, reduced.runner, RollbackCache(reduced.target.config), ids)[0]


def _run(
    reduced: ReducedModel, runner: TargetRunner, cache: RollbackCache, ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits, and the hidden states before and after each run of ``reduced``'s cut."""
    layers = decoder_layers(runner.model, len(cache.layers))
    before: list[Tensor] = []
    after: list[Tensor] = []
    handles = []
    for run in reduced.cut.runs:
        handles += [
            layers[run[0]].register_forward_pre_hook(lambda _, inputs: before.append(inputs[0])),
            layers[run[-1]].register_forward_hook(lambda _, __, output: after.append(hidden(output))),
        ]
    options = {} if mask is None else {"attention_mask": mask}
    try:
        logits = runner.call(Block.rows_of(ids), cache, **options).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, list(zip(before, after, strict=True))
