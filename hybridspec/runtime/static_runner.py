"""A runner whose sequences live at fixed addresses, see :mod:`hybridspec.state.static_cache`."""

import weakref
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from hybridspec.errors import InputError
from hybridspec.runtime.graphs import Graphs
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.selftest import check_rollback
from hybridspec.runtime.session import SHORT_BLOCK
from hybridspec.state.static_cache import Arena, StaticRollbackCache


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
        super().__init__(model, tokenizer, "tape", path)

    def check(self, fall_back: bool = False) -> None:
        """The self-test, on static caches."""
        self.max_length = self.capacity = min(self.capacity, self.max_length)
        check_rollback(self)

    def new_cache(self) -> StaticRollbackCache:
        """A cache in the arena of a closed session, or in a new one."""
        try:
            arena = self._free.pop()
        except IndexError:
            arena = Arena(self.config, self.device, self.capacity, self.longest, Graphs(self.graphs))
        cache = StaticRollbackCache(self.config, arena)
        weakref.finalize(cache, self._free.append, arena).atexit = False
        return cache
