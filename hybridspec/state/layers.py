"""Cache layers that can take tokens back: what each holds, how it grows during a pass, how it returns to a position.

Recurrent states and convolution windows are replaced, not mutated, so a snapshot costs nothing; keys and values share
one buffer that is copied only if a restored session writes over positions that another snapshot still needs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from hybridspec.errors import UnsupportedLayerError
from hybridspec.recurrence.tape import stack
from hybridspec.state.pass_context import States, Windows, current

GROWTH = 512


@dataclass
class KeyValueBuffer:
    """Storage that snapshots share: columns of the positions from ``start`` on; those below ``protected`` belong to a
    snapshot.
    """

    keys: Tensor
    values: Tensor
    start: int = 0
    protected: int = 0

    @property
    def end(self) -> int:
        """First position that has no room."""
        return self.start + self.keys.shape[-2]


@dataclass(frozen=True)
class LayerState:
    """What one layer holds at a position, apart from its recurrent state."""

    buffer: KeyValueBuffer | None = None
    indexer: tuple[Tensor | None, Tensor | None] = (None, None)
    windows: tuple[Tensor | None, ...] = ()


class AttentionLayer(DynamicLayer):
    """Keys and values of one attention layer in a buffer that grows by steps; a rollback moves the length.

    With a sliding ``window`` the buffer holds no more than the window of the committed position, and what follows.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = window
        self.is_sliding = window is not None
        self.length = self.committed = 0
        self.buffer: KeyValueBuffer | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[-2]
        buffer = self.room(key_states, value_states, end)
        fresh = slice(start - buffer.start, end - buffer.start)
        buffer.keys[..., fresh, :] = key_states
        buffer.values[..., fresh, :] = value_states
        self.length = end
        seen = slice(self._first_seen(start) - buffer.start, fresh.stop)
        return buffer.keys[..., seen, :], buffer.values[..., seen, :]

    def room(self, keys: Tensor, values: Tensor, end: int) -> KeyValueBuffer:
        """The buffer, with room up to position ``end`` for such keys and values and nothing protected in the way."""
        if self.buffer is None or end > self.buffer.end or self.length < self.buffer.protected:
            self.use(self._larger(keys, values, end))
        return self.buffer

    def _first_seen(self, position: int) -> int:
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def _larger(self, keys: Tensor, values: Tensor, end: int) -> KeyValueBuffer:
        """A new buffer with room up to position ``end`` and some growth, holding what may still be looked at."""
        start = max(self._first_seen(self.committed), 0 if self.buffer is None else self.buffer.start)
        needed = end - start
        room = -(-(needed + needed // 2) // GROWTH) * GROWTH
        # Zeros: a compiled pass looks at the whole buffer, and what it masks must be finite.
        fresh = KeyValueBuffer(*(x.new_zeros(*x.shape[:-2], room, x.shape[-1]) for x in (keys, values)), start)
        if self.buffer is not None:
            old = slice(start - self.buffer.start, self.length - self.buffer.start)
            fresh.keys[..., : self.length - start, :] = self.buffer.keys[..., old, :]
            fresh.values[..., : self.length - start, :] = self.buffer.values[..., old, :]
        return fresh

    def use(self, buffer: KeyValueBuffer | None) -> None:
        self.buffer = buffer
        self.is_initialized = buffer is not None
        self.keys, self.values = (None, None) if buffer is None else (buffer.keys, buffer.values)
        if buffer is not None:
            self.dtype, self.device = buffer.keys.dtype, buffer.keys.device

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_seen(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        return self.length

    def shorten(self, pending: int) -> None:
        """Forgets what was fed beyond ``pending`` tokens after the committed ones."""
        self.length = min(self.length, self.committed + pending)

    def state(self, rejected: int, own: bool) -> LayerState:
        return LayerState(self.buffer)

    def go_to(self, state: LayerState, length: int) -> None:
        if state.buffer is not self.buffer:
            self.use(state.buffer)
        self.length = self.committed = length


class IndexedLayer(AttentionLayer):
    """An attention layer with the keys of a sparse-attention indexer, and the positions that one model keeps there."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None

    @property
    def is_indexer_initialized(self) -> bool:
        return self.indexer_keys is not None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Appends ``[B, T, d]`` and returns all of them."""
        if self.indexer_keys is not None:
            indexer_key_states = torch.cat([self.indexer_keys, indexer_key_states], 1)
        self.indexer_keys = indexer_key_states
        return indexer_key_states

    def shorten(self, pending: int) -> None:
        super().shorten(pending)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : self.length]

    def state(self, rejected: int, own: bool) -> LayerState:
        return LayerState(self.buffer, (self.indexer_keys, self.indexer_position_ids))

    def go_to(self, state: LayerState, length: int) -> None:
        super().go_to(state, length)
        keys, positions = state.indexer
        self.indexer_keys = None if keys is None or not length else keys[:, :length]
        self.indexer_position_ids = None if positions is None or not length else positions[..., :length]


class RecurrentLayer(LinearAttentionLayer):
    """Convolution windows and recurrent state of one layer, both as of the last advance.

    ``record_past`` stays on: it makes transformers' mixers take their left context from ``update_conv_state`` for one
    token as for many.

    Args:
        count: number of windows.
        fill: what a window of token ids holds before the first token.
    """

    def __init__(self, count: int = 1, fill: int = 0) -> None:
        super().__init__(number_of_states=count)
        self.record_past = True
        self.conv_states, self.recurrent_states = Windows(count), States(count)
        self.fill = fill

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Appends ``[B, C, T]`` inputs and returns ``[B, C, kernel + T]``; a fresh sequence starts from zeros."""
        fill = 0 if conv_states.is_floating_point() else self.fill
        self.has_previous_state[state_idx] = self.is_conv_states_initialized[state_idx] = True
        return self.conv_states.append(state_idx, conv_states, conv_kernel_size or conv_states.shape[-1], fill)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        now = current.get()
        tapes = [] if now is None else now.claim()
        if now is None or now.purpose == "advance":
            self.set_state(recurrent_states, state_idx)
        elif not tapes:
            raise UnsupportedLayerError("it writes a recurrent state whose recurrence is not known here")
        else:
            # Zamba stacks the (empty) final states of its groups of heads.
            heads = recurrent_states.ndim == 2
            self.recurrent_states.tapes = [stack(tapes, 1)] if heads else tapes
        return recurrent_states

    def take_tape(self) -> object | None:
        """The tape of the last pass; None for a layer that has only windows."""
        tapes, self.recurrent_states.tapes = self.recurrent_states.tapes, []
        state = self.recurrent_states.get(0)
        if state is not None and state.ndim == 4 and tapes and len(tapes[0].state_shape) == 3:
            return stack(tapes, 1)
        return tapes[0] if tapes else None

    def shorten(self, pending: int) -> None:
        """Forgets what was fed beyond ``pending`` tokens after the committed ones."""
        for index, kernel in self.conv_states.kernels.items():
            window = self.conv_states.get(index)
            if window is not None and window.shape[-1] > kernel + pending:
                self.conv_states[index] = window[..., : kernel + pending]

    def state(self, rejected: int, own: bool) -> LayerState:
        return LayerState(windows=self._windows(rejected, own))

    def _windows(self, rejected: int, own: bool) -> tuple[Tensor | None, ...]:
        """The windows without the last ``rejected`` inputs; ``own`` copies them out of a long block."""
        kept = []
        for index, kernel in self.conv_states.kernels.items():
            window = self.conv_states.get(index)
            if window is not None:
                end = window.shape[-1] - rejected
                window = window[..., end - kernel : end]
                window = window.clone() if own else window
            kept.append(window)
        return tuple(kept)

    def go_to(self, state: LayerState, length: int) -> None:
        windows = state.windows or (None,) * self.number_of_states
        for index, window in enumerate(windows):
            self.conv_states[index] = window
            self.has_previous_state[index] = self.is_conv_states_initialized[index] = window is not None
        self.recurrent_states.tapes = []

    def set_state(self, state: Tensor | None, index: int = 0) -> None:
        self.recurrent_states[index] = state
        self.is_recurrent_states_initialized[index] = state is not None


class HybridLayer(RecurrentLayer, AttentionLayer):
    """Attention and a recurrence (or convolutions) in one layer."""

    def __init__(self, count: int = 1, fill: int = 0, window: int | None = None) -> None:
        AttentionLayer.__init__(self, window)
        RecurrentLayer.__init__(self, count, fill)

    def shorten(self, pending: int) -> None:
        RecurrentLayer.shorten(self, pending)
        AttentionLayer.shorten(self, pending)

    def state(self, rejected: int, own: bool) -> LayerState:
        return LayerState(self.buffer, windows=self._windows(rejected, own))

    def go_to(self, state: LayerState, length: int) -> None:
        RecurrentLayer.go_to(self, state, length)
        AttentionLayer.go_to(self, state, length)


#: Name of transformers' layer class (not every version has all) -> ours, made from one of theirs.
LAYERS: dict[str, Callable] = {
    "DynamicLayer": lambda theirs, fill: AttentionLayer(),
    "DynamicSlidingWindowLayer": lambda theirs, fill: AttentionLayer(theirs.sliding_window),
    "DynamicIndexedLayer": lambda theirs, fill: IndexedLayer(),
    "LinearAttentionLayer": lambda theirs, fill: RecurrentLayer(theirs.number_of_states, fill),
    "LinearAttentionAndFullAttentionLayer": lambda theirs, fill: HybridLayer(theirs.number_of_states, fill),
    "LinearAttentionAndSlidingWindowAttentionLayer": lambda theirs, fill: HybridLayer(
        theirs.number_of_states, fill, theirs.sliding_window
    ),
    "DummyLayer": lambda theirs, fill: theirs,
}


def rollback_layers(layers: list, config: PreTrainedConfig) -> list:
    """Our layers for those that transformers would use.

    Raises:
        UnsupportedLayerError: one has no rollback here; names its index and class.
    """
    eos = getattr(config, "eos_token_id", None)
    fill = (eos[0] if isinstance(eos, list) else eos) or 0
    layers = list(layers)
    for index, kind in enumerate(getattr(config, "layers_block_type", ())):
        # RecurrentGemma: transformers 5.16 has attention layers for these, and leaves them empty.
        if kind == "recurrent":
            layers[index] = LinearAttentionLayer()
    for index, layer in enumerate(layers):
        if type(layer).__name__ not in LAYERS:
            raise UnsupportedLayerError(
                f"layer {index} keeps its past in a {type(layer).__name__}, and its tokens cannot be taken back by "
                "the tape. Use rollback='recompute'."
            )
    return [LAYERS[type(layer).__name__](layer, fill) for layer in layers]
