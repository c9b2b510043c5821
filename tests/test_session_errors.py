"""Misuse raises a typed error that says what was given, and leaves everything, pending blocks too, as it was."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from hybridspec.errors import ContextLengthError, InputError, SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from tests.comparison import assert_holds
from tests.tiny import VOCABULARY

MakeRunner = Callable[..., TargetRunner]
every_mode = pytest.mark.parametrize("mode", ["tape", "recompute"])

MISUSE: dict[str, tuple[Callable[[Session], object], type[Exception], str]] = {
    "empty block": (lambda s: s.verify([]), InputError, "at least one token"),
    "token too large": (lambda s: s.verify([1, VOCABULARY]), InputError, str(VOCABULARY)),
    "negative token": (lambda s: s.verify([1, -1]), InputError, "-1"),
    "block too long": (lambda s: s.verify([1] * 10), ContextLengthError, "16"),
    "keep too many": (lambda s: s.commit(4), SessionError, "4 of 3"),
    "keep negative": (lambda s: s.commit(-1), SessionError, "-1 of 3"),
    "snapshot with a pending block": (lambda s: s.snapshot(), SessionError, "commit"),
    "prefill with a pending block": (lambda s: s.prefill([1]), SessionError, "commit"),
    "prefill too long": (lambda s: s.prefill([1] * 10), ContextLengthError, "16"),
    "prefill outside the vocabulary": (lambda s: s.prefill([1, VOCABULARY]), InputError, str(VOCABULARY)),
}


@every_mode
@pytest.mark.parametrize("name", MISUSE)
def test_misuse_changes_nothing(make_runner: MakeRunner, mode: str, name: str) -> None:
    """4 committed and 3 pending tokens of a context of 16."""
    action, error, message = MISUSE[name]
    session = make_runner("plain", mode, context=16).start([5, 6, 7, 8, 9])
    session.verify([1, 2, 3])
    with pytest.raises(error, match=message):
        action(session)
    assert session.room == 9
    session.commit(2)
    assert_holds(session, [5, 6, 7, 8, 1, 2])


@every_mode
def test_the_context_can_be_filled_to_the_last_token(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode, context=12).start([5, 6, 7])
    session.verify(list(range(10)))
    assert session.room == 0
    with pytest.raises(ContextLengthError):
        session.verify([1])
    session.commit(10)
    assert session.tokens == [5, 6, *range(10)]
    with pytest.raises(ContextLengthError):
        session.prefill([1])


@every_mode
def test_a_prompt_must_fit_whole(make_runner: MakeRunner, mode: str) -> None:
    """Its last token opens the first block, so it needs a place too."""
    runner = make_runner("plain", mode, context=12)
    assert runner.start(list(range(12))).room == 1
    for length in (13, 14, 40):
        with pytest.raises(ContextLengthError):
            runner.start([1] * length)


@every_mode
def test_an_empty_prompt_is_refused(make_runner: MakeRunner, mode: str) -> None:
    with pytest.raises(InputError, match="empty"):
        make_runner("plain", mode).start([])


@every_mode
def test_a_closed_session_does_nothing_more(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode).start([5, 6, 7])
    mark = session.snapshot()
    session.verify([1, 2])
    session.close()
    session.close()
    actions: list[Callable[[], object]] = [
        lambda: session.verify([1]),
        lambda: session.commit(0),
        lambda: session.commit(1),
        lambda: session.prefill([1]),
        lambda: session.prefill(list(range(40))),
        lambda: session.snapshot(),
        lambda: session.restore(mark),
    ]
    for action in actions:
        with pytest.raises(SessionError):
            action()
    assert "closed" in repr(session)


@every_mode
def test_an_exception_frees_the_state(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner("plain", mode)
    with pytest.raises(ZeroDivisionError), runner.start([5, 6, 7]) as session:
        cache = weakref.ref(session.cache)
        session.verify([1, 2])
        _ = 1 / 0
    gc.collect()
    assert cache() is None
    with pytest.raises(SessionError, match="closed"):
        session.verify([1])


@pytest.mark.parametrize("chunk", [0, -1, 1.5])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(make_runner: Callable[..., TargetRunner], chunk: float) -> None:
    session = make_runner("plain").start([3, 4])
    with pytest.raises(InputError, match="chunk"):
        session.prefill([7, 8, 9], chunk=chunk)
    assert session.tokens == [3]


def test_ids_come_in_any_flat_form_and_no_other(make_runner: Callable[..., TargetRunner]) -> None:
    runner = make_runner("plain")
    assert runner.start(torch.tensor([5, 6, 7])).tokens == [5, 6]
    session = runner.start([5, 6])
    for bad in (torch.tensor([[5, 6, 7]]), [3.5], "abc", torch.tensor([0.5])):
        for call in (runner.start, session.verify, session.prefill):
            with pytest.raises(InputError, match="flat"):
                call(bad)
    assert session.tokens == [5]
