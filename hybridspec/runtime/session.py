"""One sequence on a model: feed blocks, look at the logits, keep what you like, take the rest back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

from torch import Tensor

from hybridspec.errors import ContextLengthError, InputError, SessionError
from hybridspec.runtime.model import LoadedModel
from hybridspec.state.base import PassOutput, SequenceCache
from hybridspec.state.block import Block
from hybridspec.state.pass_context import Purpose, current

#: Called in each forward pass with the position of its first token and the hidden states ``[T, d]`` that the head
#: reads.
Observer = Callable[[int, Tensor], None]
#: Opened around a forward pass, which it may shorten.
Watching = Callable[[], AbstractContextManager]

#: Longest block that goes through the recorded short form; longer prefill chunks take transformers' own chunked form.
SHORT_BLOCK = 32


def flat_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as a list of int, from any flat sequence of integers (a tensor, an array).

    Raises:
        InputError: it is not one, for example a batch ``[1, T]``.
    """
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        return [index(token) for token in tokens]
    except TypeError as error:
        raise InputError(f"token ids must be a flat sequence of integers: {error}") from error


class Session:
    """Made by :meth:`TargetRunner.start`; a context manager that frees its state on every way out.

    A target and a draft use the same class.

    Attributes:
        observers: told the hidden states of each pass, for strategies that draft from them.
    """

    def __init__(self, runner: LoadedModel) -> None:
        self.runner = runner
        self.observers: list[Observer] = []
        self._cache: SequenceCache | None = runner.new_cache()
        # What the cache was fed: its committed tokens come first, then its pending ones.
        self._fed: list[int] = []

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the state. A closed session can do nothing more."""
        self._cache = None
        self._fed = []
        self.observers = []

    @property
    def cache(self) -> SequenceCache:
        if self._cache is None:
            raise SessionError("this session is closed: start a new one")
        return self._cache

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        return self._fed[: self._cache.length] if self._cache else []

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self.cache.length

    @property
    def room(self) -> int:
        """Tokens that still fit into the model's context, pending ones taken off."""
        return self.runner.max_length - self.cache.length - self.cache.pending

    @property
    def recurrent_bytes(self) -> int:
        """See :attr:`hybridspec.state.base.SequenceCache.recurrent_bytes`."""
        return self.cache.recurrent_bytes

    def prefill(self, tokens: Sequence[int], chunk: int = 512) -> None:
        """Feeds and commits tokens without looking at their logits, ``chunk`` at a time (bounded memory).

        A single token left over joins the last chunk: some models compute one token otherwise than many.
        """
        if not isinstance(chunk, int) or chunk < 1:
            raise InputError(f"chunk must be a positive number of tokens, not {chunk!r}")
        tokens = self._checked(tokens)
        if self.cache.pending:
            raise SessionError("commit the pending block before a prefill")
        if self.runner.clamps_steps:
            chunk = max(2, chunk)
        while tokens:
            size = len(tokens) if chunk > 1 and len(tokens) == chunk + 1 else chunk
            part, tokens = tokens[:size], tokens[size:]
            if len(part) > SHORT_BLOCK:
                self.advance(part)
            else:
                self._feed(part, "prefill")
                self.commit(len(part))

    def advance(self, tokens: Sequence[int]) -> None:
        """Feeds and commits tokens of a prompt in transformers' own many-token form, which leaves no tape."""
        tokens = self._checked(tokens)
        with self._intact(tokens) as position:
            self.cache.advance(Block.chain(tokens, position, self.runner.device), self._pass(position))

    def verify(self, block: Sequence[int], watching: Watching = nullcontext) -> Tensor:
        """Logits ``[len(block), vocab]`` after each token of the block; nothing is kept before :meth:`commit`.

        Blocks add up: after two calls without a commit both are pending.

        Args:
            watching: opened around the forward pass, which it may shorten (see
                :mod:`hybridspec.drafts.full_attention.segments`): the logits
                are then of the block's first tokens, and only those are pending.

        Raises:
            ContextLengthError: the block does not fit into the model's context. Nothing changes then.
        """
        if not len(block):
            raise InputError("a block needs at least one token")
        return self._feed(self._checked(block), watching=watching)

    def commit(self, keep: int) -> None:
        """Keeps the first ``keep`` pending tokens; every layer becomes as if it had never seen the others."""
        cache = self.cache
        if not 0 <= keep <= cache.pending:
            raise SessionError(f"cannot keep {keep} of {cache.pending} pending tokens")
        with self._intact():
            cache.commit([range(keep)], self._pass(cache.length))

    def snapshot(self) -> "Mark":
        """A mark that this session can :meth:`restore`, any number of times. Commit first."""
        return Mark(self, tuple(self.tokens), self.cache.snapshot())

    def restore(self, mark: "Mark") -> None:
        """Returns to a mark; pending tokens are dropped.

        Raises:
            SessionError: the mark is another session's. Nothing changes then.
        """
        if mark.session is not self:
            raise SessionError("the mark was taken from another session: restore it there")
        cache, tokens = self.cache, list(mark.tokens)
        try:
            cache.restore(mark.state)
            self._fed = tokens
        except BaseException:
            cache.abort()
            if cache.is_at(mark.state):
                self._fed = tokens
            raise

    def _feed(self, tokens: list[int], purpose: Purpose = "verify", watching: Watching = nullcontext) -> Tensor:
        """A forward pass whose tokens stay pending."""
        with self._intact(tokens) as position:
            block = Block.chain(tokens, position, self.runner.device)
            logits = self.cache.feed(block, purpose, self._pass(position, watching))[0]
            # A pass that was cut short took in fewer tokens.
            self._fed = self._fed[: self.cache.length + self.cache.pending]
        return logits

    def _pass(self, position: int, watching: Watching = nullcontext) -> "SessionPass":
        return SessionPass(self.runner, position, tuple(self.observers), watching)

    @contextmanager
    def _intact(self, block: Sequence[int] = ()) -> Iterator[int]:
        """Adds ``block`` to the fed tokens and gives its position.

        Whatever fails inside, an interrupt too, leaves the committed tokens and drops the pending ones.
        """
        position = self.cache.length + self.cache.pending
        try:
            self._fed = [*self._fed[:position], *block]
            yield position
        except BaseException:
            self.cache.abort()
            raise

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        tokens = flat_ids(tokens)
        if len(tokens) > self.room:
            raise ContextLengthError(
                f"{len(tokens)} more tokens do not fit: {self.length} of the context of "
                f"{self.runner.max_length} are used"
            )
        bad = next((t for t in tokens if not 0 <= t < self.runner.vocab_size), None)
        if bad is not None:
            raise InputError(f"token {bad} is outside the model's vocabulary of {self.runner.vocab_size}")
        return tokens

    def __repr__(self) -> str:
        state = "closed" if self._cache is None else f"{self.length} tokens, {self.cache.pending} pending"
        return f"Session({state})"


@dataclass
class SessionPass:
    """Runs a session's model on what the session holds; see :class:`hybridspec.state.base.Forward`.

    Attributes:
        position: of the next token to run.
    """

    model: LoadedModel
    position: int
    observers: Sequence[Observer] = ()
    watching: Watching = nullcontext

    @property
    def observed(self) -> bool:
        return bool(self.observers) or self.watching is not nullcontext

    def __call__(self, cache: Any, block: Block, last_only: bool = False) -> PassOutput:
        now, position = current.get(), self.position
        self.position += block.width
        with self.watching():
            if now is not None and now.purpose == "verify" and not self.observed:
                return self.model.verify(cache, block)
            told = [partial(observer, position) for observer in self.observers]
            return self.model.run(cache, block, last_only, told)


@dataclass(frozen=True)
class Mark:
    """A position of a session, made by :meth:`Session.snapshot`."""

    session: Session
    tokens: tuple[int, ...]
    state: object
