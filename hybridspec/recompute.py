"""The ``recompute`` mode: a copy of the whole cache before each block, and the kept tokens fed again after a partial
rejection.

It needs nothing from a model but a cache that ``copy.deepcopy`` copies, so it serves families without a tape and is
the reference in tests.
"""

import copy

from transformers import DynamicCache, PreTrainedConfig

from hybridspec.errors import SessionError


class RecomputeCache:
    """transformers' own dynamic cache, with the copy that a rollback returns to."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.cache = DynamicCache(config=config)
        self.length = 0
        self.pending = 0
        self._saved: DynamicCache | None = None

    def begin_block(self) -> None:
        if not self.pending:
            self._saved = copy.deepcopy(self.cache)

    def end_block(self, tokens: int) -> None:
        self.pending += tokens

    def commit(self, keep: int) -> bool:
        """True if the cache already holds exactly the kept tokens; False if it went back and they must be fed again."""
        if not 0 <= keep <= self.pending:
            raise SessionError(f"cannot keep {keep} of {self.pending} pending tokens")
        complete = keep == self.pending
        if not complete:
            self.cache = self._saved
        self._saved, self.pending = None, 0
        self.length += keep if complete else 0
        return complete or keep == 0

    def abort(self) -> None:
        if self._saved is not None:
            self.cache, self._saved, self.pending = self._saved, None, 0

    def snapshot(self) -> tuple[int, DynamicCache]:
        if self.pending:
            raise SessionError("commit the pending block before taking a snapshot")
        return self.length, copy.deepcopy(self.cache)

    def restore(self, mark: tuple[int, DynamicCache]) -> None:
        self.length, cache = mark
        self.cache, self._saved, self.pending = copy.deepcopy(cache), None, 0
