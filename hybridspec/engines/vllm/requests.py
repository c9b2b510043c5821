"""Requests of a serving engine that tells token histories instead of names: each finds its draft again by what the
draft has been told so far.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hybridspec.decoding.draft import Draft, Drafting
from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Step

#: Calls in a row that a request may be missing from before its state is freed. An engine that is short of tokens in a
#: step leaves running requests out of it.
PATIENCE = 8


@dataclass(eq=False)
class Request:
    """One sequence: ``tokens`` is what its drafting has been told, ``proposed`` what it was last asked for, ``filled``
    how many tokens of nobody's choice the engine was given behind that.
    """

    drafting: Drafting
    length: DraftLength
    tokens: np.ndarray
    proposed: list[int] = field(default_factory=list)
    filled: int = 0
    draft_seconds: float = 0.0
    absent: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return len(self.tokens), int(self.tokens[-1])

    def go_on(self, history: np.ndarray, seconds: float) -> None:
        """Tells the drafting what the engine has made of the proposal.

        Args:
            history: all tokens so far ``[n]``, at least one more than ``tokens``.
            seconds: this request's share of the time that the engine took.
        """
        fresh = history[len(self.tokens) :].tolist()
        accepted = 0
        while accepted < min(len(fresh) - 1, len(self.proposed)) and self.proposed[accepted] == fresh[accepted]:
            accepted += 1
        self.drafting.accept(accepted, fresh[accepted])
        for token in fresh[accepted + 1 :]:
            self.drafting.accept(0, token)
        self.length.observe(Step(len(self.proposed), accepted, self.draft_seconds, seconds, 0.0))
        self.tokens, self.proposed, self.filled, self.draft_seconds = history.copy(), [], 0, 0.0

    def propose(self, k: int) -> list[int]:
        wanted = min(k, self.length.limit())
        if wanted > 0:
            proceed = self.length.proceed if self.length.looks_at_drafts else None
            self.proposed = self.drafting.propose(wanted, proceed).first(wanted).tokens
        return self.proposed


class Requests:
    """The requests that hold draft state.

    A request that is missing from :data:`PATIENCE` calls in a row has ended, was aborted or preempted: its state is
    freed, and made anew from its history should it come back. Beyond ``capacity`` the one unused for longest goes.

    Args:
        make_length: a draft-length rule for one request. The rule of a request that has gone serves a later one, with
            what it has learnt.

    Attributes:
        opened, closed: how many so far.
    """

    def __init__(self, draft: Draft, make_length: Callable[[], DraftLength], capacity: int) -> None:
        self.draft, self.capacity = draft, capacity
        self.opened = self.closed = 0
        self._make_length = make_length
        self._spare_lengths: list[DraftLength] = []
        # In order of use, the latest last; and by length and last token.
        self._open: dict[Request, None] = {}
        self._by_key: dict[tuple[int, int], list[Request]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, history: np.ndarray, most: int, seconds: float) -> Request:
        """The request of ``history`` ``[n]``, brought up to it, or a new one.

        Args:
            most: most tokens that a history grows by between two calls.

        Raises:
            ContextLengthError: it is longer than the draft's context.
        """
        n = len(history)
        for old in range(n - 1, max(0, n - 1 - most), -1):
            for request in self._by_key.get((old, int(history[old - 1])), ()):
                if n - old <= len(request.proposed) + request.filled + 1 and np.array_equal(
                    request.tokens, history[:old]
                ):
                    self._remove(request)
                    try:
                        request.go_on(history, seconds)
                    except BaseException:
                        self._close(request)
                        raise
                    self._add(request)
                    return request
        drafting = self.draft.start(history.tolist(), Sampling())
        length = self._spare_lengths.pop() if self._spare_lengths else self._make_length()
        request = Request(drafting, length, history.copy())
        self.opened += 1
        self._add(request)
        while len(self._open) > self.capacity:
            self.free(next(iter(self._open)))
        return request

    def end_call(self, seen: set[Request]) -> None:
        """After each call: ``seen`` are the requests that were in it."""
        for request in list(self._open):
            request.absent = 0 if request in seen else request.absent + 1
            if request.absent >= PATIENCE:
                self.free(request)

    def free(self, request: Request) -> None:
        self._remove(request)
        self._close(request)

    def clear(self) -> None:
        for request in list(self._open):
            self.free(request)

    def _add(self, request: Request) -> None:
        self._open[request] = None
        self._by_key.setdefault(request.key, []).append(request)

    def _remove(self, request: Request) -> None:
        del self._open[request]
        alike = self._by_key[request.key]
        alike.remove(request)
        if not alike:
            del self._by_key[request.key]

    def _close(self, request: Request) -> None:
        self.closed += 1
        self._spare_lengths.append(request.length)
        request.drafting.close()
