"""A target without its recurrent layers: what is kept, what stands in for the rest, and a pass over it.

The reduced model is a shallow copy: it shares every module with the target but the list of decoder layers, in which
each run of layers that is cut out is replaced by a bridge, or by nothing. The target itself is never touched.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.model_facts import decoder_layers
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.block import Block
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import AttentionLayer, HybridLayer, IndexedLayer, RecurrentLayer

#: Normed embeddings ``[B, T, (window - 1) d]`` of the tokens before each one, for the bridges of the pass in progress.
_context: ContextVar[Tensor | None] = ContextVar("hybridspec_bridge_context", default=None)


@dataclass(frozen=True)
class Cut:
    """Which decoder layers draft.

    Attributes:
        kept: indices of the full-attention layers.
        runs: indices of the recurrent (and sliding-window) layers, each run what stands between two that stay.
        returned: of each of these, how many values its class returns as a tuple; 0 for a bare tensor.
        width: size of the hidden states.
    """

    kept: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]
    returned: dict[int, int]
    width: int


def cut(target: TargetRunner) -> Cut:
    """The layers of ``target`` by what drafting with full attention alone does with them.

    Layers that keep no past (the feed-forward layers of Nemotron-H) stay.

    Raises:
        UnsupportedLayerError: there is nothing to cut or nothing to keep, or a layer is both; names it.
    """
    if target.rollback == "recompute":
        raise UnsupportedLayerError(
            f"full-attention drafts read keys and values from the target's rollback cache, and {target.name} runs with "
            "rollback='recompute', which keeps none. Use tape or slots, or another draft."
        )
    cache = RollbackCache(target.config)
    layers = decoder_layers(target.model, len(cache.layers))
    if not layers:
        raise UnsupportedLayerError(
            f"{target.name} does not run {len(cache.layers)} decoder layers one after the other, so none can be cut out"
        )
    for index, held in enumerate(cache.layers):
        if isinstance(held, HybridLayer | IndexedLayer):
            what = "mixes attention and a recurrence" if isinstance(held, HybridLayer) else "selects keys by an indexer"
            raise UnsupportedLayerError(
                f"layer {index} ({type(layers[index]).__name__}) of {target.name} {what} in one layer, which "
                "full-attention drafts cannot cut. Use another draft."
            )
    out = [isinstance(c, RecurrentLayer) or (isinstance(c, AttentionLayer) and c.is_sliding) for c in cache.layers]
    kept = tuple(i for i, c in enumerate(cache.layers) if isinstance(c, AttentionLayer) and not out[i])
    if not kept:
        raise UnsupportedLayerError(f"{target.name} has no full-attention layer to draft with. Use another draft.")
    if not cache.recurrent:
        raise UnsupportedLayerError(
            f"{target.name} has no recurrent layer to leave out: its full-attention draft would be itself"
        )
    grouped = (tuple(group) for _, group in groupby(range(len(out)), out.__getitem__))
    runs = tuple(run for run in grouped if out[run[0]])
    outputs = _outputs(target, {i: layers[i] for run in runs for i in run})
    width = next(iter(outputs.values()))[1]
    return Cut(kept, runs, {index: values for index, (values, _) in outputs.items()}, width)


def _outputs(target: TargetRunner, layers: dict[int, nn.Module]) -> dict[int, tuple[int, int]]:
    """How many values each layer returns as a tuple (0: none), and the width of its hidden states."""
    seen: dict[int, tuple[int, int]] = {}

    def note(index: int) -> Any:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            seen[index] = len(output) if isinstance(output, tuple) else 0, hidden(output).shape[-1]

        return hook

    handles = [layer.register_forward_hook(note(index)) for index, layer in layers.items()]
    try:
        target.run(None, Block.chain([0], 0, target.device))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def hidden(output: Any) -> Tensor:
    """Hidden states of a decoder layer's output, which some classes wrap in a tuple."""
    return output[0] if isinstance(output, tuple) else output


class StandIn(nn.Module):
    """In a decoder layer's place: hands the hidden states on, through a bridge if there is one."""

    def __init__(self, layer: nn.Module, bridge: nn.Module | None, returned: int) -> None:
        super().__init__()
        self.bridge, self.returned = bridge, returned
        # Not as a submodule: models read settings from their layers, and nothing else of it is wanted.
        self.__dict__["stands_for"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "stands_for" not in self.__dict__:
                raise
            return getattr(self.__dict__["stands_for"], name)

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor | None, ...]:
        if self.bridge is not None:
            hidden_states = self.bridge(hidden_states, _context.get())
        return (hidden_states, *[None] * (self.returned - 1)) if self.returned else hidden_states


class ReducedModel:
    """``target`` with its full-attention layers only.

    Args:
        bridges: one for each run, called with hidden states ``[B, T, d]`` and the context ``[B, T, (window - 1) d]``;
            None skips the runs.
        window: number of tokens, the present one included, that a bridge sees.

    Raises:
        UnsupportedLayerError: see :func:`cut`.
    """

    def __init__(self, target: TargetRunner, bridges: Sequence[nn.Module] | None = None, window: int = 1) -> None:
        self.target, self.window = target, window
        self.cut = cut(target)
        count = len(RollbackCache(target.config).layers)
        theirs = decoder_layers(target.model, count)
        path = next(name for name, module in target.model.named_modules() if module is theirs)
        layers = list(theirs)
        for number, run in enumerate(self.cut.runs):
            for place, index in enumerate(run):
                bridge = bridges[number] if bridges is not None and place == 0 else None
                layers[index] = StandIn(theirs[index], bridge, self.cut.returned[index])
        self._embeddings = target.model.get_input_embeddings()
        #: Runs the reduced model as ``target`` runs the whole one.
        self.runner = copy.copy(target)
        self.runner.model = _with_module(target.model, path.split("."), nn.ModuleList(layers))

    def forward(self, cache: RollbackCache, block: Sequence[int], position: int, before: Sequence[int] = ()) -> Tensor:
        """Logits ``[T, vocab]`` of a block that starts at ``position``, after the tokens ``before`` (only the last
        ``window - 1`` matter).
        """
        tokens = Block.chain(block, position, self.target.device)
        with self.context(tokens.tokens, before):
            return self.runner.run(cache, tokens).logits[0]

    @contextmanager
    def context(self, ids: Tensor, before: Sequence[int] = ()) -> Iterator[Tensor | None]:
        """For a pass over token ids ``[B, T]``: shows the bridges the tokens in front of each one, as
        ``[B, T, (window - 1) d]``; None with a window of 1.
        """
        reach = self.window - 1
        if not reach:
            yield None
            return
        known = list(before)[-reach:]
        front = [-1] * (reach - len(known)) + known
        rows = torch.cat([torch.tensor([front], device=ids.device).expand(len(ids), -1), ids[:, :-1]], 1)
        # [B, T + window - 2] -> [B, T, window - 1]: the nearest token comes last.
        seen = rows.unfold(1, reach, 1)
        with torch.no_grad():
            embedded = normed(self._embeddings(seen.clamp(min=0))) * (seen >= 0).unsqueeze(-1)
        token = _context.set(embedded.flatten(2))
        try:
            yield _context.get()
        finally:
            _context.reset(token)


def normed(x: Tensor) -> Tensor:
    """Root mean square 1 over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


def _with_module(root: nn.Module, path: list[str], module: nn.Module) -> nn.Module:
    """A shallow copy of ``root`` in which ``module`` stands at ``path``."""
    twin = copy.copy(root)
    head, *rest = path
    twin._modules = root._modules | {head: _with_module(root._modules[head], rest, module) if rest else module}
    twin._forward_hooks, twin._forward_pre_hooks = root._forward_hooks.copy(), root._forward_pre_hooks.copy()
    return twin
