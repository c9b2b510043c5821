"""A runner whose sequences live at fixed addresses: what a CUDA graph of verify and commit needs.

A verify pass writes the state after its block to a second plane, so that keeping all of the block only swaps the
planes; keeping a part rebuilds it there from the tape. Nothing is allocated that outlives a pass, nothing waits for the
GPU, and the number of tokens kept is a tensor on the device. Everywhere but on CUDA the same code runs without graphs.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from hybridspec.errors import ContextLengthError, InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.graphs import Graphs
from hybridspec.runtime.runner import Observer, TargetRunner, observed
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import SHORT_BLOCK
from hybridspec.state.cache import grouped
from hybridspec.state.cache_class import accepted
from hybridspec.state.pass_context import current
from hybridspec.state.static_layers import (
    Group,
    Place,
    StaticAttentionLayer,
    StaticRecurrentLayer,
    lasting,
    static_layers,
)


class Arena:
    """Everything that keeps its address from session to session: buffers, and the graphs that were captured on them."""

    def __init__(
        self, config: PreTrainedConfig, device: torch.device, capacity: int, longest: int, graphs: bool
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
        self.graphs = Graphs(graphs)

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


class StaticRollbackCache(Cache):
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
        """Number of committed tokens."""
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

    def show(self) -> None:
        """Brings what the layers show, their states and windows, up to date with the committed position."""
        self.arena.arm()

    def begin_block(self) -> None:
        """Call before each recorded forward pass."""
        self._check()
        self.arena.start.fill_(self.arena.place.position)

    def begin_prefill(self) -> None:
        """Call before a forward pass of a long chunk, which :meth:`commit_prefill` keeps."""
        self.begin_block()
        self.arena.place.growing = True
        self.arena.arm()

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

    def commit(self, keep: int) -> None:
        """Keeps the first ``keep`` pending tokens and takes the others back."""
        place = self.arena.place
        if not 0 <= keep <= place.pending:
            raise SessionError(f"cannot keep {keep} of {place.pending} pending tokens")
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
        """Drops everything pending, also after a forward pass or a commit that failed half way."""
        place = self.arena.place
        self._place(place.length, place.parity)

    def snapshot(self) -> Saved:
        """A copy of the committed position."""
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


class StaticRunner(TargetRunner):
    """A :class:`TargetRunner` in ``tape`` mode whose sessions run at fixed addresses, on CUDA as graphs.

    One graph for each block length, each plane and each number of tokens pending before it, captured when it is first
    needed. A pass at the start of a sequence, a prefill and a pass that somebody observes run without one.

    Args:
        model: a transformers causal language model in evaluation mode.
        capacity: tokens that there is room for, prompt included; the context of the model if that is shorter. Every
            attention layer looks at all of it in every pass, so take no more than needed.
        longest: pending tokens that there is room for, at least those of a short prefill.
        graphs: False captures nothing.

    Raises:
        InputError: ``capacity`` is not positive.
        UnsupportedLayerError: a layer of the model has no rollback by tape, or no fixed size; names it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        path: Path | None = None,
        *,
        capacity: int,
        longest: int = SHORT_BLOCK,
        graphs: bool = True,
    ) -> None:
        if capacity < 1:
            raise InputError(f"capacity must be a positive number of tokens, not {capacity!r}")
        self.capacity, self.longest, self.graphs = capacity, max(longest, SHORT_BLOCK), graphs
        # Arenas of sessions that are closed.
        self._free: list[Arena] = []
        super().__init__(model, tokenizer, path=path, rollback="tape")

    def check(self, fall_back: bool = False) -> None:
        """The self-test, on static caches."""
        self.max_length = self.capacity = min(self.capacity, self.max_length)
        check_rollback(self)

    def new_cache(self) -> StaticRollbackCache:
        """A cache in the arena of a closed session, or in a new one."""
        try:
            arena = self._free.pop()
        except IndexError:
            arena = Arena(self.config, self.device, self.capacity, self.longest, self.graphs)
        cache = StaticRollbackCache(self.config, arena)
        weakref.finalize(cache, self._free.append, arena).atexit = False
        return cache

    def forward(
        self,
        cache: StaticRollbackCache,
        block: Sequence[int],
        position: int,
        last_only: bool = False,
        observers: Sequence[Observer] = (),
    ) -> Tensor:
        """Logits ``[T, vocab]`` of a block, or ``[1, vocab]`` of its last token."""
        if not isinstance(cache, StaticRollbackCache):
            return super().forward(cache, block, position, last_only, observers)
        now = current.get()
        if now is not None and now.purpose == "advance":
            cache.begin_prefill()
            return super().forward(cache, block, position, last_only, observers)
        arena = cache.arena
        place, tokens = arena.place, len(block)
        if place.pending + tokens > place.longest:
            raise ContextLengthError(
                f"{place.pending + tokens} pending tokens are more than the {place.longest} that this StaticRunner has "
                "room for: raise longest"
            )
        arena.ids[:, :tokens].copy_(torch.tensor([block]))
        with torch.inference_mode():
            if observers or last_only or not place.position:
                return self._observed_pass(cache, tokens, last_only, observers)
            key = ("verify", tokens, place.parity, place.pending)
            # The states after earlier pending blocks are read and written in the same plane.
            changes = [group.planes[place.other] for group in arena.groups or ()] if place.pending else []
            logits = arena.graphs.run(key, lambda: self._pass(cache, tokens), arena.device, changes)
            # A graph writes its next logits over these.
            return logits.clone() if key in arena.graphs.captured else logits

    def _observed_pass(
        self, cache: StaticRollbackCache, tokens: int, last_only: bool, observers: Sequence[Observer]
    ) -> Tensor:
        options = {"logits_to_keep": 1} if last_only else {}
        if not observers:
            return self._pass(cache, tokens, **options)
        with observed(self.model, cache.arena.place.position, observers):
            return self._pass(cache, tokens, **options)

    def _pass(self, cache: StaticRollbackCache, tokens: int, **options: Any) -> Tensor:
        """What a graph captures: no value of the device is looked at."""
        arena = cache.arena
        arena.arm()
        if self._takes_positions:
            positions = arena.start + torch.arange(tokens, device=arena.device)
            options["position_ids"] = positions.unsqueeze(0)
        options[self._cache_argument] = cache
        logits = self.model(input_ids=arena.ids[:, :tokens], use_cache=True, **options).logits[0]
        arena.record(tokens)
        return logits
