"""RollbackCache: a transformers cache that can take tokens back, from attention, convolution and recurrent layers
alike.

Tokens enter in blocks. A block stays pending until ``commit(keep)``; nothing committed is ever written by a block.
Recurrent states and convolution windows are replaced, not mutated, so a snapshot costs nothing; keys and values share
one buffer that is copied only if a restored session writes over positions that another snapshot still needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from hybridspec.errors import SessionError, UnsupportedLayerError
from hybridspec.recurrence.tape import Tape, join, rollback, stack

GROWTH = 512


@dataclass
class KeyValueBuffer:
    """Storage that snapshots share; positions below ``protected`` belong to one of them."""

    keys: Tensor
    values: Tensor
    protected: int = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[-2]


class AttentionLayer(DynamicLayer):
    """Keys and values of one full-attention layer in a buffer that grows by steps; a rollback moves the length."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.buffer: KeyValueBuffer | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[-2]
        if self.buffer is None or end > self.buffer.capacity or start < self.buffer.protected:
            self._use(self._larger(key_states, value_states, end))
        self.buffer.keys[..., start:end, :] = key_states
        self.buffer.values[..., start:end, :] = value_states
        self.length = end
        return self.buffer.keys[..., :end, :], self.buffer.values[..., :end, :]

    def _larger(self, keys: Tensor, values: Tensor, length: int) -> KeyValueBuffer:
        """A new buffer with room for ``length`` tokens and some growth, holding the present ones."""
        room = -(-(length + length // 2) // GROWTH) * GROWTH
        fresh = KeyValueBuffer(*(x.new_empty(*x.shape[:-2], room, x.shape[-1]) for x in (keys, values)))
        if self.buffer is not None:
            fresh.keys[..., : self.length, :] = self.buffer.keys[..., : self.length, :]
            fresh.values[..., : self.length, :] = self.buffer.values[..., : self.length, :]
        return fresh

    def _use(self, buffer: KeyValueBuffer | None) -> None:
        self.buffer = buffer
        self.is_initialized = buffer is not None
        self.keys, self.values = (None, None) if buffer is None else (buffer.keys, buffer.values)
        if buffer is not None:
            self.dtype, self.device = buffer.keys.dtype, buffer.keys.device

    def get_seq_length(self) -> int:
        return self.length

    def go_to(self, buffer: KeyValueBuffer | None, length: int) -> None:
        if buffer is not self.buffer:
            self._use(buffer)
        self.length = length


class RecurrentLayer(LinearAttentionLayer):
    """Convolution window and recurrent state of one linear-attention layer, both as of the last advance.

    ``record_past`` stays on: it makes transformers' mixers take their left context from ``update_conv_state`` for one
    token as for many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record_past = True
        self.tape: Tape | None = None
        self.kernel = 0

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Appends ``[B, C, T]`` inputs and returns ``[B, C, kernel + T]``; a fresh sequence starts from zeros."""
        if not self.has_previous_state[state_idx]:
            self.kernel = conv_kernel_size or conv_states.shape[-1]
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], self.kernel)
            self.has_previous_state[state_idx] = self.is_conv_states_initialized[state_idx] = True
        self.conv_states[state_idx] = torch.cat([self.conv_states[state_idx], conv_states], -1)
        return self.conv_states[state_idx][..., -self.kernel - conv_states.shape[-1] :]

    def update_recurrent_state(self, recurrent_states: "Tensor | Tape", state_idx: int = 0, **_: object) -> object:
        if isinstance(recurrent_states, Tape):
            self.tape = recurrent_states
        else:
            self.recurrent_states[state_idx] = recurrent_states
            self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def take_tape(self) -> Tape:
        if self.tape is None:
            raise SessionError("a linear-attention layer left no tape: its recurrence is not one that hybridspec wraps")
        tape, self.tape = self.tape, None
        return tape

    def window(self, keep: int, own: bool) -> Tensor | None:
        """The window after ``keep`` pending tokens; ``own`` copies it out of a long block."""
        grown = self.conv_states.get(0)
        if grown is None:
            return None
        window = grown[..., keep : keep + self.kernel]
        return window.clone() if own else window

    def set_window(self, window: Tensor | None) -> None:
        self.conv_states[0] = window
        self.has_previous_state[0] = self.is_conv_states_initialized[0] = window is not None

    def set_state(self, state: Tensor | None) -> None:
        self.recurrent_states[0] = state
        self.is_recurrent_states_initialized[0] = state is not None


LAYERS = {"full_attention": AttentionLayer, "linear_attention": RecurrentLayer}


@dataclass(frozen=True)
class Committed:
    """All layers at a position: ``states [layers, B, H, K, V]``, a convolution window and a key-value buffer per layer.

    As long as nobody writes over its part of the buffers, a cache can return to it; see :meth:`RollbackCache.snapshot`.
    """

    length: int
    states: Tensor | None
    windows: tuple[Tensor | None, ...]
    buffers: tuple[KeyValueBuffer | None, ...]


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; a config without the field is a dense model, all full attention."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["full_attention"] * config.num_hidden_layers


class RollbackCache(Cache):
    """Cache of one sequence (or a batch of equal length) with exact rollback of pending tokens.

    Args:
        kinds: the type of each layer, as from :func:`layer_types`.

    Raises:
        UnsupportedLayerError: a layer type has no rollback here; names its index and type.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        for index, kind in enumerate(kinds):
            if kind not in LAYERS:
                raise UnsupportedLayerError(
                    f"layer {index} is {kind!r}: its tokens cannot be taken back by the tape. Use rollback='recompute'."
                )
        super().__init__(layers=[LAYERS[kind]() for kind in kinds])
        self.attention = [layer for layer in self.layers if isinstance(layer, AttentionLayer)]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        self.pending = 0
        # Replaced as a whole, so that an interrupt at any point leaves either the old position or the new one.
        self._committed = Committed(0, None, (None,) * len(self.recurrent), (None,) * len(self.attention))
        self._advanced: Tensor | None = None  # states after all but the last pending block
        self._blocks: list[Tape] = []

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._committed.length

    def begin_block(self) -> None:
        """Call before each recorded forward pass: brings the states up to date with earlier pending blocks."""
        if self._blocks:
            self._advanced = rollback(self._advanced, self._blocks[-1], self._blocks[-1].length)
            self._give(self._advanced)

    def end_block(self, tokens: int) -> None:
        """Call after each recorded forward pass of ``tokens`` tokens."""
        if self.recurrent:
            self._blocks.append(stack([layer.take_tape() for layer in self.recurrent]))
        self.pending += tokens
        if any(layer.length != self.length + self.pending for layer in self.attention):
            raise UnsupportedLayerError(
                "an attention layer did not put its tokens into the cache, so they cannot be taken back. "
                "Use rollback='recompute'."
            )

    def commit(self, keep: int) -> None:
        """Keeps the first ``keep`` pending tokens and takes the others back."""
        if not 0 <= keep <= self.pending:
            raise SessionError(f"cannot keep {keep} of {self.pending} pending tokens")
        states = self._committed.states
        if self._blocks and keep:
            before_last = self.pending - self._blocks[-1].length
            if keep > before_last:
                states = rollback(self._advanced, self._blocks[-1], keep - before_last)
            else:
                states = rollback(states, join(self._blocks), keep)
        self._settle(self.length + keep, states, keep, own_windows=self.pending > GROWTH)

    def commit_prefill(self, tokens: int) -> None:
        """Keeps an unrecorded forward pass, after which the layers hold final states instead of tapes."""
        states = torch.stack([layer.recurrent_states[0] for layer in self.recurrent]) if self.recurrent else None
        self._settle(self.length + tokens, states, tokens, own_windows=True)

    def _settle(self, length: int, states: Tensor | None, keep: int, own_windows: bool) -> None:
        windows = tuple(layer.window(keep, own_windows) for layer in self.recurrent)
        self._committed = Committed(length, states, windows, tuple(layer.buffer for layer in self.attention))
        self.abort()

    def abort(self) -> None:
        """Drops everything pending, also after a forward pass or a commit that failed half way."""
        committed = self._committed
        self.pending = 0
        self._blocks.clear()
        self._advanced = committed.states
        self._give(committed.states)
        for layer, window in zip(self.recurrent, committed.windows, strict=True):
            layer.set_window(window)
            layer.tape = None
        for layer, buffer in zip(self.attention, committed.buffers, strict=True):
            layer.go_to(buffer, committed.length)

    def _give(self, states: Tensor | None) -> None:
        for index, layer in enumerate(self.recurrent):
            layer.set_state(None if states is None else states[index])

    def snapshot(self) -> Committed:
        """The committed position, protected from being written over."""
        if self.pending:
            raise SessionError("commit the pending block before taking a snapshot")
        for buffer in self._committed.buffers:
            if buffer is not None:
                buffer.protected = max(buffer.protected, self.length)
        return self._committed

    def is_at(self, mark: Committed) -> bool:
        return self._committed is mark

    def restore(self, mark: Committed) -> None:
        self._committed = mark
        self.abort()
