"""The ``recompute`` mode: a copy of the whole cache before each block, and the kept tokens fed again after a partial
rejection.

It needs nothing from a model but a cache that it returns and that ``copy.deepcopy`` copies, so it serves families
without a tape and is the reference in tests. Where transformers' own past cannot be continued (see
:mod:`hybridspec.hooks.mixers`) our cache layers take its place, without their tape.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from hybridspec.errors import SessionError
from hybridspec.state.base import Forward, SequenceCache, states_of
from hybridspec.state.block import Block, Paths, kept_prefix
from hybridspec.state.cache import RollbackCache
from hybridspec.state.pass_context import Purpose, recording


class RecomputeCache(SequenceCache):
    """Whatever the model itself keeps: a block runs on a copy, which replaces the original when all of it is kept.

    Args:
        one_by_one: the model continues wrongly from its own past with more than one token.
        clamps_steps: its many-token path clamps time steps, which decoding does not, so a block to verify is run token
            by token.
    """

    def __init__(self, one_by_one: bool = False, clamps_steps: bool = False) -> None:
        self.one_by_one, self.clamps_steps = one_by_one, clamps_steps
        #: What the model returned last.
        self.cache: Any = self.fresh()
        self.pending = 0
        self._blocks: list[Block] = []
        # Replaced as a whole, so that an interrupt at any point leaves either the old position or the new one.
        self._committed: tuple[Any, int] = (self.cache, 0)

    def fresh(self) -> Any:
        """The cache of an empty sequence; None if the model's first pass makes it."""
        return None

    @property
    def length(self) -> int:
        return self._committed[1]

    def feed(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        if not self.pending:
            self.cache = copy.deepcopy(self._committed[0])
        logits = self.run(block, purpose, forward)
        self._blocks.append(block)
        self.pending += block.width
        return logits

    def run(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        """Logits of a block that :attr:`cache` takes in, in as many passes as the model needs."""
        single = (self.one_by_one and self.cache is not None) or (self.clamps_steps and purpose == "verify")
        parts = [block.columns(i, i + 1) for i in range(block.width)] if single else [block]
        logits = []
        for part in parts:
            output = forward(self.cache, part, last_only=purpose == "prefill")
            self.cache = output.cache
            logits.append(output.logits)
        return torch.cat(logits, 1)

    def commit(self, paths: Paths, forward: Forward | None = None) -> None:
        keep = kept_prefix(paths, self.pending)
        if keep == self.pending:
            self._committed = (self.cache, self.length + keep)
            self.abort()
            return
        fed = self._blocks
        self.abort()
        if not keep:
            return
        if forward is None:
            raise SessionError("this cache runs kept tokens again, and was not told how to run the model")
        again = Block.joined(fed).columns(0, keep)
        self.feed(again, "verify", forward)
        self.commit(paths, forward)

    def abort(self) -> None:
        self.cache, self.pending, self._blocks = self._committed[0], 0, []

    def snapshot(self) -> tuple[Any, int]:
        if self.pending:
            raise SessionError("commit the pending block before taking a snapshot")
        # Blocks run on copies, so the committed cache is never written again.
        return self._committed

    def is_at(self, mark: tuple[Any, int]) -> bool:
        return self._committed is mark

    def restore(self, mark: tuple[Any, int]) -> None:
        self._committed = mark
        self.abort()

    def recurrent_states(self) -> list[Tensor]:
        return states_of(getattr(self.cache, "layers", ()))


class RecomputeOnOurLayers(RecomputeCache):
    """The same on a :class:`RollbackCache`, for models whose own past cannot be continued at all, or not for several
    sessions.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        super().__init__()

    def fresh(self) -> RollbackCache:
        return RollbackCache(self._config)

    def run(self, block: Block, purpose: Purpose, forward: Forward) -> Tensor:
        with recording("advance", block):
            logits = forward(self.cache, block, last_only=purpose == "prefill").logits
            self.cache.commit_prefill(block.width)
        return logits
