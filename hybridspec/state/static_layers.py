"""Cache layers whose tensors never move: room for a whole sequence is there from the first token on.

A layer has two planes, and everything of a committed position lies in one of them. A pass reads that plane and writes
the state after its block to the other, so that keeping the whole block copies nothing: the planes change places.
Keeping a part of it writes the other plane once more, from the tape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hybridspec.errors import UnsupportedLayerError
from hybridspec.recurrence.tape import AnyTape, join, rollback, stack
from hybridspec.state.layers import AttentionLayer, HybridLayer, RecurrentLayer, rollback_layers
from hybridspec.state.pass_context import States, Windows

Planes = tuple[Tensor, Tensor]


@dataclass
class Place:
    """Where the next tokens go; one for all layers of a cache.

    Attributes:
        start: ``[1]`` int64 on the device: position of the next token.
        capacity: positions that there is room for.
        longest: pending tokens that there is room for.
        parity: the plane of the committed position.
        length: committed tokens.
        pending: tokens after those.
        growing: a long chunk of a prefill, which runs on tensors of its own size.
    """

    start: Tensor
    capacity: int
    longest: int
    parity: int = 0
    length: int = 0
    pending: int = 0
    growing: bool = False

    @property
    def position(self) -> int:
        return self.length + self.pending

    @property
    def other(self) -> int:
        return 1 - self.parity


def lasting(shape: tuple[int, ...], like: Tensor, fill: int = 0) -> Tensor:
    """A tensor that may be written to everywhere, also where it was first needed in inference mode."""
    with torch.inference_mode(False):
        return torch.full(shape, fill, dtype=like.dtype, device=like.device)


class StaticAttentionLayer(AttentionLayer):
    """Keys and values of ``capacity`` positions; those from the committed ones on are overwritten by the next block.

    With a sliding window too: a mask hides what has left it.
    """

    is_compileable = True

    def __init__(self, place: Place, window: int | None = None) -> None:
        super().__init__(window)
        self.place = place

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.keys, self.values = (
                lasting((*x.shape[:-2], self.place.capacity, x.shape[-1]), x) for x in (key_states, value_states)
            )
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        tokens = key_states.shape[-2]
        positions = self.place.start + torch.arange(tokens, device=key_states.device)
        self.keys.index_copy_(-2, positions, key_states)
        self.values.index_copy_(-2, positions, value_states)
        if not self.place.growing:
            return self.keys, self.values
        seen = slice(self._first_seen(self.place.position), self.place.position + tokens)
        return self.keys[..., seen, :], self.values[..., seen, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self.place.growing:
            return self.place.capacity, 0
        first = self._first_seen(self.place.position)
        return self.place.position + query_length - first, first

    def get_seq_length(self) -> int | Tensor:
        """On the device, for a mask that a captured graph builds anew each time."""
        return self.place.position if self.place.growing or not self.place.position else self.place.start[0]

    def saved(self) -> tuple[Tensor, Tensor] | None:
        """A copy of the committed positions."""
        if self.keys is None:
            return None
        return self.keys[..., : self.place.length, :].clone(), self.values[..., : self.place.length, :].clone()

    def load(self, saved: tuple[Tensor, Tensor] | None) -> None:
        if saved is not None:
            for plane, part in zip((self.keys, self.values), saved, strict=True):
                plane[..., : part.shape[-2], :] = part


class StaticWindows(Windows):
    """In each plane ``kernel + longest`` columns: a committed window, and behind it what the pending tokens put in."""

    def __init__(self, count: int, place: Place) -> None:
        super().__init__(count)
        self.place = place
        self.planes: dict[int, Planes] = {}

    def arm(self) -> None:
        """Shows the window of the next token."""
        place = self.place
        for index, planes in self.planes.items():
            window = planes[place.parity].narrow(-1, place.pending, self.kernels[index])
            self[index] = window if place.position else None

    def append(self, index: int, inputs: Tensor, kernel: int, fill: int = 0) -> Tensor:
        place = self.place
        if index not in self.planes:
            self.kernels[index] = kernel
            shape = (*inputs.shape[:-1], kernel + place.longest)
            self.planes[index] = lasting(shape, inputs, fill), lasting(shape, inputs, fill)
        plane, kernel, tokens = self.planes[index][place.parity], self.kernels[index], inputs.shape[-1]
        if not place.position:
            plane.narrow(-1, 0, kernel).fill_(fill)
        if place.growing:
            grown = torch.cat([plane.narrow(-1, 0, kernel), inputs], -1)
            self.planes[index][place.other].narrow(-1, 0, kernel).copy_(grown[..., -kernel:])
            return grown
        plane.narrow(-1, kernel + place.pending, tokens).copy_(inputs)
        return plane.narrow(-1, place.pending, kernel + tokens)

    def settle(self, keep: int | Tensor) -> None:
        """The window after the first ``keep`` pending tokens, into the other plane."""
        for index, planes in self.planes.items():
            now, after = planes[self.place.parity], planes[self.place.other].narrow(-1, 0, self.kernels[index])
            if isinstance(keep, int):
                after.copy_(now.narrow(-1, keep, self.kernels[index]))
            else:
                columns = keep.flatten() + torch.arange(self.kernels[index], device=now.device)
                after.copy_(now.index_select(-1, columns))

    def saved(self) -> dict[int, Tensor]:
        return {i: p[self.place.parity].narrow(-1, 0, self.kernels[i]).clone() for i, p in self.planes.items()}

    def load(self, saved: dict[int, Tensor], plane: int) -> None:
        for index, window in saved.items():
            self.planes[index][plane].narrow(-1, 0, self.kernels[index]).copy_(window)


class StaticRecurrentLayer(RecurrentLayer):
    """Windows and recurrent state of one layer; the states' planes belong to a :class:`Group` of layers."""

    is_compileable = True

    def __init__(self, place: Place, count: int = 1, fill: int = 0) -> None:
        super().__init__(count, fill)
        self.place = place
        self.conv_states, self.recurrent_states = StaticWindows(count, place), States(count)

    def arm(self) -> None:
        self.conv_states.arm()
        self.recurrent_states.tapes, self.recurrent_states.final = [], None
        for index, window in self.conv_states.items():
            started = window is not None
            self.has_previous_state[index] = self.is_conv_states_initialized[index] = started
        if not self.place.position:
            self.set_state(None)


class StaticHybridLayer(StaticRecurrentLayer, StaticAttentionLayer):
    """Attention and a recurrence (or convolutions) in one layer."""

    def __init__(self, place: Place, count: int = 1, fill: int = 0, window: int | None = None) -> None:
        StaticAttentionLayer.__init__(self, place, window)
        StaticRecurrentLayer.__init__(self, place, count, fill)


@dataclass
class Group:
    """Recurrent layers of one state shape: their states ``[layers, *shape]`` in two planes, and the tape of what is
    pending.
    """

    layers: list[StaticRecurrentLayer]
    planes: Planes
    tape: AnyTape | None = None

    def arm(self, place: Place) -> None:
        if place.position:
            source = self.planes[place.other if place.pending else place.parity]
            for i, layer in enumerate(self.layers):
                layer.set_state(source[i])
                layer.recurrent_states.final = self.planes[place.other][i]

    def record(self, tapes: list[AnyTape], place: Place) -> None:
        """Takes over the tape of a pass, and leaves the state after it in the other plane."""
        together = stack(tapes)
        if self.tape is None:
            longest = join([together] * -(-place.longest // together.length)).part(0, place.longest)
            self.tape = type(longest)(*(lasting(x.shape, x) for x in longest))
        end = place.pending + together.length
        for own, given in zip(self.tape.part(place.pending, end), together, strict=True):
            own.copy_(given)
        if place.position and all(layer.recurrent_states.final is None for layer in self.layers):
            # The kernels have written it.
            return
        source = self.planes[place.other if place.pending else place.parity] if place.position else None
        self.planes[place.other].copy_(rollback(source, together, together.length))

    def settle(self, keep: int | Tensor, place: Place) -> None:
        """The state after the first ``keep`` pending tokens, into the other plane."""
        before = self.planes[place.parity] if place.length else None
        self.planes[place.other].copy_(rollback(before, self.tape.part(0, place.pending), keep))


def static_layers(layers: list, config: object, place: Place) -> list:
    """Static layers for those that transformers would use.

    Raises:
        UnsupportedLayerError: one has no rollback, or no fixed size here; names its index and class.
    """
    return [_static(index, layer, place) for index, layer in enumerate(rollback_layers(layers, config))]


def _static(index: int, layer: object, place: Place) -> object:
    if type(layer) is AttentionLayer:
        return StaticAttentionLayer(place, layer.sliding_window)
    if type(layer) is RecurrentLayer:
        return StaticRecurrentLayer(place, layer.number_of_states, layer.fill)
    if type(layer) is HybridLayer:
        return StaticHybridLayer(place, layer.number_of_states, layer.fill, layer.sliding_window)
    if isinstance(layer, CacheLayerMixin | DynamicLayer):
        raise UnsupportedLayerError(
            f"layer {index} keeps its past in a {type(layer).__name__}, which has no fixed size here. Use TargetRunner."
        )
    return layer
