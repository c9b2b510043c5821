"""The ``recompute`` mode: a copy of the whole cache before each block, and the kept tokens fed again after a partial
rejection.

It needs nothing from a model but a cache that it returns and that ``copy.deepcopy`` copies, so it serves families
without a tape and is the reference in tests. Where transformers' own past cannot be continued (see
:mod:`hybridspec.hooks.mixers`) our cache layers take its place, without their tape.
"""

import copy
from typing import Any

from hybridspec.errors import SessionError


class RecomputeCache:
    """Whatever the model itself keeps: a block runs on a copy, which replaces the original when all of it is kept.

    Args:
        start: the cache of an empty sequence; None if the model's first pass makes it.
    """

    def __init__(self, start: Any = None) -> None:
        #: What the model returned last.
        self.cache: Any = start
        self.pending = 0
        # Replaced as a whole, so that an interrupt at any point leaves either the old position or the new one.
        self._committed: tuple[Any, int] = (start, 0)

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._committed[1]

    def begin_block(self) -> None:
        if not self.pending:
            self.cache = copy.deepcopy(self._committed[0])

    def end_block(self, tokens: int, dropped: int = 0) -> None:
        self.pending += tokens

    def commit(self, keep: int) -> bool:
        """True if the cache now holds exactly the kept tokens; False if it went back and they must be fed again."""
        if not 0 <= keep <= self.pending:
            raise SessionError(f"cannot keep {keep} of {self.pending} pending tokens")
        complete = keep == self.pending
        if complete:
            self._committed = (self.cache, self.length + keep)
        self.abort()
        return complete or keep == 0

    def abort(self) -> None:
        """Drops everything pending, also after a forward pass or a commit that failed half way."""
        self.cache, self.pending = self._committed[0], 0

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
