"""A cache of one sequence whose tensors never move: what a CUDA graph of verify and commit needs.

A verify pass writes the state after its block to a second plane, so that keeping all of the block only swaps the
planes; keeping a part rebuilds it there from the tape. Nothing is allocated that outlives a pass, nothing waits for the
GPU, and the number of tokens kept is a tensor on the device. Everywhere but on CUDA the same code runs without graphs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache

from hybridspec.errors import ContextLengthError, SessionError, UnsupportedLayerError
from hybridspec.state.base import Forward, SequenceCache, states_of
from hybridspec.state.block import Block, Paths, kept_prefix
from hybridspec.state.cache import grouped
from hybridspec.state.cache_class import accepted
from hybridspec.state.pass_context import Purpose, recording
from hybridspec.state.static_layers import (
    Group,
    Place,
    StaticAttentionLayer,
    StaticRecurrentLayer,
    lasting,
    static_layers,
)


class Replays(Protocol):
    """Runs functions by key, from a recording of an earlier run where it has one."""

    @property
    def captured(self) -> frozenset[Hashable]: ...

    def captures(self, device: torch.device) -> bool: ...

    def run(
        self, key: Hashable, function: Callable[[], Any], device: torch.device, changes: Sequence[Tensor] = ()
    ) -> Any: ...


class Arena:
    """Everything that keeps its address from session to session: buffers, and the graphs that were captured on them."""

    def __init__(
        self, config: PreTrainedConfig, device: torch.device, capacity: int, longest: int, graphs: Replays
    ) -> None:
        with torch.inference_mode(False):
            self.start = torch.zeros(1, dtype=torch.long, device=device)
            #: Tokens that a commit keeps, as a rollback takes them: one count for all layers and rows.
            self.keep = torch.zeros(1, 1, dtype=torch.long, device=device)
            self.ids = torch.zeros(1, longest, dtype=torch.long, device=device)
        self.place = Place(self.start, capacity, longest)
        self.layers = static_layers(DynamicCache(config=config).layers, config, self.place)
        self.attention = [layer for layer in self.layers if isinstance(layer, StaticAttentionLayer)]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, StaticRecurrentLayer)]
        #: Known once a first pass has shown the shapes of the states.
        self.groups: list[Group] | None = None
        self.graphs = graphs

    @property
    def device(self) -> torch.device:
        return self.start.device

    def tensors(self) -> list[Tensor]:
        """Every tensor whose address is fixed."""
        found = [self.start, self.keep, self.ids]
        found += [x for layer in self.attention for x in (layer.keys, layer.values) if x is not None]
        found += [x for layer in self.recurrent for planes in layer.conv_states.planes.values() for x in planes]
        for group in self.groups or ():
            found += [*group.planes, *(group.tape or ())]
        return found

    def arm(self) -> None:
        """Shows the layers where the next tokens go."""
        for layer in self.recurrent:
            layer.arm()
        for group in self.groups or ():
            group.arm(self.place)

    def group(self, layers: list[StaticRecurrentLayer], shapes: list[tuple[int, ...]]) -> list[Group]:
        """The groups, made from the shapes of a first pass."""
        if self.groups is None:
            shape = {id(layer): shape for layer, shape in zip(layers, shapes, strict=True)}
            like = torch.empty(0, dtype=torch.float32, device=self.device)
            self.groups = [
                Group(group, tuple(lasting((len(group), *shape[id(group[0])]), like) for _ in range(2)))
                for group in grouped(layers, shapes)
            ]
        if len(layers) != sum(len(group.layers) for group in self.groups):
            raise SessionError("a recurrent layer left no tape: its recurrence is not one that hybridspec wraps")
        return self.groups

    def record(self, tokens: int) -> None:
        """After a pass of so many tokens: takes over its tapes, and leaves states and windows after all that is pending
        in the other plane.
        """
        for layer in self.recurrent:
            layer.conv_states.settle(self.place.pending + tokens)
        tapes = {id(layer): (layer, layer.take_tape()) for layer in self.recurrent}
        tapes = {key: pair for key, pair in tapes.items() if pair[1] is not None}
        layers = [layer for layer, _ in tapes.values()]
        for group in self.group(layers, [tape.state_shape for _, tape in tapes.values()]):
            group.record([tapes[id(layer)][1] for layer in group.layers], self.place)

    def settle(self, keep: int | Tensor) -> None:
        """States and windows after the first ``keep`` pending tokens, into the other plane."""
        for layer in self.recurrent:
            layer.conv_states.settle(keep)
        for group in self.groups or ():
            group.settle(keep, self.place)


@dataclass(frozen=True)
class Saved:
    """A copy of a committed position."""

    length: int
    attention: list[tuple[Tensor, Tensor] | None]
    windows: list[dict[int, Tensor]]
    states: list[Tensor]


class StaticRollbackCache(Cache, SequenceCache):
    """A :class:`hybridspec.state.cache.RollbackCache` of one sequence in an arena; sessions use it the same way."""

    is_compileable = True

    def __new__(cls, config: PreTrainedConfig, arena: Arena) -> "StaticRollbackCache":
        return super().__new__(accepted(cls, config.model_type))

    def __init__(self, config: PreTrainedConfig, arena: Arena) -> None:
        Cache.__init__(self, layers=list(arena.layers))
        self.arena = arena
        self._is_at: Saved | None = None
        #: A restore that an interrupt cut short leaves a sequence that is none.
        self._torn = False
        self._place(0, arena.place.parity)

    @property
    def length(self) -> int:
        return self.arena.place.length

    @property
    def pending(self) -> int:
        return self.arena.place.pending

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Also where there is no attention layer to ask, which transformers refuses."""
        return super().get_seq_length(layer_idx) if self.arena.attention else self.arena.place.position

    def _place(self, length: int, parity: int) -> None:
        place = self.arena.place
        place.length, place.parity, place.pending, place.growing = length, parity, 0, False

    def recurrent_states(self) -> list[Tensor]:
        self.show()
        return states_of(self.layers)

    def show(self) -> None:
        """Brings what the layers show, their states and windows, up to date with the committed position."""
        self.arena.arm()

    def feed(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        self.begin_block()
        arena, place, tokens = self.arena, self.arena.place, block.width
        if place.pending + tokens > place.longest:
            raise ContextLengthError(
                f"{place.pending + tokens} pending tokens are more than the {place.longest} that this StaticRunner has "
                "room for: raise longest"
            )
        with recording(purpose, block), torch.inference_mode():
            arena.ids[:, :tokens].copy_(block.tokens)
            if forward.observed or purpose == "prefill" or not place.position:
                logits = self.run_pass(forward, tokens, last_only=purpose == "prefill")
            else:
                logits = self._replayed(forward, tokens)
        stayed = logits.shape[1] if purpose == "verify" else tokens
        self.end_block(stayed, tokens - stayed)
        return logits

    def _replayed(self, forward: Forward, tokens: int) -> Tensor:
        arena, place = self.arena, self.arena.place
        key = ("verify", tokens, place.parity, place.pending)
        # The states after earlier pending blocks are read and written in the same plane.
        changes = [group.planes[place.other] for group in arena.groups or ()] if place.pending else []
        logits = arena.graphs.run(key, lambda: self.run_pass(forward, tokens), arena.device, changes)
        # A graph writes its next logits over these.
        return logits.clone() if key in arena.graphs.captured else logits

    def run_pass(self, forward: Forward, tokens: int, last_only: bool = False) -> Tensor:
        """The first ``tokens`` of the arena's, as a graph captures it: no value of the device is looked at."""
        arena = self.arena
        arena.arm()
        logits = forward(self, Block.rows_of(arena.ids[:, :tokens], arena.start), last_only).logits
        arena.record(tokens)
        return logits

    def advance(self, block: Block, forward: Forward) -> None:
        self.begin_block()
        self.arena.place.growing = True
        self.arena.arm()
        with recording("advance", block):
            forward(self, block, last_only=True)
        self.commit_prefill(block.width)

    def begin_block(self) -> None:
        """Call before each recorded forward pass."""
        self._check()
        self.arena.start.fill_(self.arena.place.position)

    def _check(self) -> None:
        if self._torn:
            raise SessionError("this session was interrupted while it went back to a mark: restore a mark again")
        if len(self.layers) != len(self.arena.layers):
            raise UnsupportedLayerError(
                "the model adds cache layers as it runs, which have no fixed size. Use TargetRunner."
            )

    def end_block(self, tokens: int, dropped: int = 0) -> None:
        """Call after each recorded forward pass of ``tokens`` tokens."""
        self._check()
        if dropped:
            raise UnsupportedLayerError(
                "a static cache takes whole blocks: segmented verification runs on a TargetRunner only"
            )
        self.arena.place.pending += tokens

    def commit(self, paths: Paths, forward: Forward | None = None) -> None:
        place = self.arena.place
        keep = kept_prefix(paths, place.pending)
        if 0 < keep < place.pending:
            self._settle(keep)
        self._is_at = None
        self._place(place.length + keep, place.other if keep else place.parity)

    def _settle(self, keep: int) -> None:
        arena = self.arena
        if not arena.recurrent:
            return
        # At the start of a sequence there is no state to go back to.
        if not arena.graphs.captures(arena.device) or not arena.place.length:
            arena.settle(keep)
            return
        arena.keep.fill_(keep)
        key = ("commit", arena.place.parity, arena.place.pending)
        arena.graphs.run(key, lambda: arena.settle(arena.keep), arena.device)

    def commit_prefill(self, tokens: int) -> None:
        """Keeps a long chunk, after which the layers hold final states instead of tapes."""
        self._check()
        arena, place = self.arena, self.arena.place
        holding = [layer for layer in arena.recurrent if layer.recurrent_states.get(0) is not None]
        states = [layer.recurrent_states.get(0) for layer in holding]
        for group in arena.group(holding, [tuple(state.shape) for state in states]):
            torch.stack([layer.recurrent_states.get(0) for layer in group.layers], out=group.planes[place.other])
        self._is_at = None
        self._place(place.length + tokens, place.other)

    def abort(self) -> None:
        place = self.arena.place
        self._place(place.length, place.parity)

    def snapshot(self) -> Saved:
        self._check()
        arena, place = self.arena, self.arena.place
        if place.pending:
            raise SessionError("commit the pending block before taking a snapshot")
        self._is_at = Saved(
            place.length,
            [layer.saved() for layer in arena.attention],
            [layer.conv_states.saved() for layer in arena.recurrent],
            [group.planes[place.parity].clone() for group in arena.groups or ()],
        )
        return self._is_at

    def is_at(self, mark: Saved) -> bool:
        return self._is_at is mark

    def restore(self, mark: Saved) -> None:
        arena, place = self.arena, self.arena.place
        self._torn = True
        for layer, saved in zip(arena.attention, mark.attention, strict=True):
            layer.load(saved)
        for layer, windows in zip(arena.recurrent, mark.windows, strict=True):
            layer.conv_states.load(windows, place.other)
        # A mark of the empty sequence may be older than the planes, which then hold nothing that is looked at.
        for group, states in zip(arena.groups or (), mark.states, strict=False):
            group.planes[place.other].copy_(states)
        self._place(mark.length, place.other)
        self._is_at, self._torn = mark, False
