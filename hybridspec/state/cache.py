"""RollbackCache: a transformers cache that can take tokens back, from attention, convolution and recurrent layers
alike.

Tokens enter in blocks. A block stays pending until ``commit(keep)``; nothing committed is ever written by a block.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from hybridspec.errors import SessionError, UnsupportedLayerError
from hybridspec.recurrence.tape import join, rollback, stack
from hybridspec.state.base import Forward, SequenceCache, states_of
from hybridspec.state.block import Block, Paths, kept_prefix
from hybridspec.state.cache_class import accepted
from hybridspec.state.layers import GROWTH, AttentionLayer, LayerState, RecurrentLayer, rollback_layers
from hybridspec.state.pass_context import Purpose, recording

#: Recurrent states of all layers of one shape, stacked on a leading axis; one entry for each shape.
Stacked = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Committed:
    """All layers at a position.

    As long as nobody writes over its part of the buffers, a cache can return to it; see :meth:`RollbackCache.snapshot`.
    """

    length: int
    states: Stacked
    layers: tuple[LayerState, ...]


class RollbackCache(Cache, SequenceCache):
    """Cache of one sequence (or a batch of equal length) with exact rollback of pending tokens.

    Args:
        config: the model's text config; the layers follow transformers' own choice for it.
        slots: keep a state for each pending token, as serving engines do, instead of the tape: a commit picks one.

    Raises:
        UnsupportedLayerError: a layer has no rollback here; names its index and class.
    """

    def __new__(cls, config: PreTrainedConfig | None = None, *_: object, **__: object) -> "RollbackCache":
        # A deep copy gives no config; it already has its class.
        return super().__new__(cls if config is None else accepted(cls, config.model_type))

    def __init__(self, config: PreTrainedConfig, slots: bool = False) -> None:
        try:
            layers = DynamicCache(config=config).layers
        except Exception as error:
            raise UnsupportedLayerError(
                f"transformers makes no cache for this config ({type(error).__name__}: {error})."
            ) from error
        Cache.__init__(self, layers=rollback_layers(layers, config))
        self.kept: list[AttentionLayer | RecurrentLayer] = []
        self.pending = 0
        #: Layers of one state shape roll back in one product; known once a first pass has shown the shapes.
        self.groups: list[list[RecurrentLayer]] | None = None
        # Replaced as a whole, so that an interrupt at any point leaves either the old position or the new one.
        self._committed = Committed(0, (), ())
        #: States before the last pending block, or committed ones; none before the first commit.
        self.advanced: Stacked = ()
        self._blocks: list[list[tuple]] = []  # one tape for each group, for each pending block
        #: Those of the pass in progress, once it has run: see :meth:`gather`.
        self.gathered: list[tuple] | None = None
        self._slots: list[Stacked] | None = [] if slots else None
        self._take_in_layers()

    @property
    def length(self) -> int:
        return self._committed.length

    @property
    def tapes(self) -> list[list[tuple]]:
        """What pending blocks left: for each block, one tape for each group of layers."""
        return self._blocks

    def _take_in_layers(self) -> None:
        """Sorts the layers; a looping model appends some of its own in its first forward pass."""
        kept = [layer for layer in self.layers if isinstance(layer, AttentionLayer | RecurrentLayer)]
        if len(kept) > len(self.kept):
            self.attention = [layer for layer in kept if isinstance(layer, AttentionLayer)]
            self.recurrent = [layer for layer in kept if isinstance(layer, RecurrentLayer)]
            states = self._committed.layers + (LayerState(),) * (len(kept) - len(self.kept))
            self._committed = replace(self._committed, layers=states)
            self.kept = kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Also where there is no attention layer to ask, which transformers refuses."""
        return super().get_seq_length(layer_idx) if self.attention else self.length + self.pending

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: object
    ) -> Tensor:
        try:
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(f"layer {layer_idx}: {error}. Use rollback='recompute'.") from None

    def feed(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        self.begin_block()
        with recording(purpose, block):
            logits = forward(self, block, last_only=purpose == "prefill").logits
        stayed = logits.shape[1] if purpose == "verify" else block.width
        self.end_block(stayed, block.width - stayed)
        return logits

    def advance(self, block: Block, forward: Forward) -> None:
        with recording("advance", block):
            forward(self, block, last_only=True)
        self.commit_prefill(block.width)

    def begin_block(self) -> None:
        """Brings the states up to date with earlier pending blocks: call it before each recorded forward pass that does
        not come from :meth:`feed`.
        """
        if self._blocks:
            last = self._blocks[-1]
            states = self.advanced or (None,) * len(last)
            if self._slots is None:
                self.advanced = tuple(rollback(s, tape, tape.length) for s, tape in zip(states, last, strict=True))
            else:
                self.advanced = self._slots[-1]
            self.give(self.advanced)

    def gather(self, tokens: int, dropped: int = 0) -> list[tuple]:
        """The tapes of the pass that has just run, stacked: one for each group of layers."""
        if self.gathered is not None:
            return self.gathered
        tapes = [(layer, layer.take_tape()) for layer in self.recurrent]
        tapes = [(layer, tape) for layer, tape in tapes if tape is not None]
        if dropped:
            tapes = [(layer, tape.part(0, tokens)) for layer, tape in tapes]
        if self.groups is None:
            self.groups = grouped([layer for layer, _ in tapes], [tape.state_shape for _, tape in tapes])
        if len(tapes) != sum(map(len, self.groups)):
            raise SessionError("a recurrent layer left no tape: its recurrence is not one that hybridspec wraps")
        by_layer = {id(layer): tape for layer, tape in tapes}
        self.gathered = [stack([by_layer[id(layer)] for layer in group]) for group in self.groups]
        return self.gathered

    def end_block(self, tokens: int, dropped: int = 0) -> None:
        """Call after each such pass of ``tokens`` tokens.

        A pass that was cut short between layers ``dropped`` more, and layers that saw those forget them.
        """
        self._take_in_layers()
        tapes = self.gather(tokens, dropped)
        self.gathered = None
        if tapes:
            self._blocks.append(tapes)
        if self._slots is not None and tapes:
            self._fill_slots()
        self.pending += tokens
        if dropped:
            for layer in self.kept:
                layer.shorten(self.pending)
        if any(layer.length != self.length + self.pending for layer in self.attention):
            raise UnsupportedLayerError(
                "an attention layer did not put its tokens into the cache, so they cannot be taken back. "
                "Use rollback='recompute'."
            )

    def _fill_slots(self) -> None:
        states = self.advanced or (None,) * len(self._blocks[-1])
        for i in range(self._blocks[-1][0].length):
            states = tuple(rollback(s, t.part(i, i + 1), 1) for s, t in zip(states, self._blocks[-1], strict=True))
            self._slots.append(states)

    def commit(self, paths: Paths, forward: Forward | None = None) -> None:
        keep = kept_prefix(paths, self.pending)
        if keep:
            self._settle(keep, self.pending - keep, self._states_after(keep), own=self.pending > GROWTH)
        self.abort()

    def _states_after(self, keep: int) -> Stacked:
        if not self._blocks:
            return ()
        if self._slots is not None:
            return self._slots[keep - 1]
        before_last = self.pending - self._blocks[-1][0].length
        if keep > before_last:
            states, tapes, keep = self.advanced, self._blocks[-1], keep - before_last
        else:
            states, tapes = self._committed.states, [join(parts) for parts in zip(*self._blocks, strict=True)]
        states = states or (None,) * len(tapes)
        return tuple(rollback(state, tape, keep) for state, tape in zip(states, tapes, strict=True))

    def commit_prefill(self, tokens: int) -> None:
        """Keeps an unrecorded forward pass, after which the layers hold final states instead of tapes."""
        self._take_in_layers()
        holding = [layer for layer in self.recurrent if layer.recurrent_states.get(0) is not None]
        if self.groups is None:
            self.groups = grouped(holding, [tuple(layer.recurrent_states.get(0).shape) for layer in holding])
        states = tuple(torch.stack([layer.recurrent_states.get(0) for layer in group]) for group in self.groups)
        self._settle(tokens, 0, states, own=True)
        self.abort()

    def _settle(self, keep: int, rejected: int, states: Stacked, own: bool) -> None:
        layers = tuple(layer.state(rejected, own) for layer in self.kept)
        self._committed = Committed(self.length + keep, states, layers)

    def abort(self) -> None:
        self._take_in_layers()
        committed = self._committed
        self.pending = 0
        self.gathered = None
        self._blocks.clear()
        if self._slots is not None:
            self._slots.clear()
        self.advanced = committed.states
        self.give(committed.states)
        for layer, state in zip(self.kept, committed.layers, strict=True):
            layer.go_to(state, committed.length)

    def give(self, states: Stacked) -> None:
        """Hands each layer its own state."""
        if not states:
            for layer in self.recurrent:
                layer.set_state(None)
        for stacked, group in zip(states, self.groups or (), strict=False):
            for layer, state in zip(group, stacked.unbind(), strict=True):
                layer.set_state(state)

    def snapshot(self) -> Committed:
        if self.pending:
            raise SessionError("commit the pending block before taking a snapshot")
        for state in self._committed.layers:
            if state.buffer is not None:
                state.buffer.protected = max(state.buffer.protected, self.length)
        return self._committed

    def is_at(self, mark: Committed) -> bool:
        return self._committed is mark

    def restore(self, mark: Committed) -> None:
        self._committed = mark
        self.abort()

    def recurrent_states(self) -> list[Tensor]:
        return states_of(self.layers)


def grouped(layers: list[RecurrentLayer], shapes: list[tuple[int, ...]]) -> list[list[RecurrentLayer]]:
    """Layers by state shape, in order of appearance."""
    groups: dict[tuple[int, ...], list[RecurrentLayer]] = {}
    for layer, shape in zip(layers, shapes, strict=True):
        groups.setdefault(shape, []).append(layer)
    return list(groups.values())
