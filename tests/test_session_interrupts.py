"""A forward pass that fails half way, by Ctrl-C or out of memory, leaves the committed tokens; the session goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.state import cache
from tests.comparison import assert_holds

MakeRunner = Callable[..., TargetRunner]
LONG = [(5 * i + 3) % 90 for i in range(80)]


@contextmanager
def interrupted(module: nn.Module, calls: int = 0) -> Iterator[None]:
    """After ``calls`` more passes, the next one is interrupted when it has run through ``module``."""
    original, left = module.forward, [calls]

    def forward(*arguments: object, **options: object) -> object:
        result = original(*arguments, **options)
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return result

    module.forward = forward
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        del module.forward


def stop_at(runner: TargetRunner, place: str) -> nn.Module:
    """The first linear layer, one in the middle, the attention layer (the last), or the head behind all of them."""
    model = runner.model
    return {"first": model.model.layers[0], "middle": model.model.layers[1], "last": model.model.layers[3]}.get(
        place, model.lm_head
    )


every_mode = pytest.mark.parametrize("mode", ["tape", "recompute"])
every_place = pytest.mark.parametrize("place", ["first", "middle", "last", "head"])


@every_mode
@every_place
@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]], ids=["empty", "committed"])
def test_verify(make_runner: MakeRunner, mode: str, place: str, prompt: list[int]) -> None:
    runner = make_runner("plain", mode)
    session = runner.start(prompt)
    with interrupted(stop_at(runner, place)):
        session.verify([1, 2, 3])
    assert_holds(session, prompt[:-1])


@every_mode
@every_place
def test_second_pending_block(make_runner: MakeRunner, mode: str, place: str) -> None:
    """Everything pending is dropped, the earlier block too."""
    runner = make_runner("plain", mode)
    session = runner.start([5, 6, 7])
    session.verify([1, 2, 3])
    with interrupted(stop_at(runner, place)):
        session.verify([4, 8])
    assert_holds(session, [5, 6])


@every_mode
@every_place
@pytest.mark.parametrize("tokens", [[8, 9], LONG], ids=["short", "long"])
def test_prefill(make_runner: MakeRunner, mode: str, place: str, tokens: list[int]) -> None:
    runner = make_runner("plain", mode)
    session = runner.start([5, 6, 7])
    with interrupted(stop_at(runner, place)):
        session.prefill(tokens)
    assert_holds(session, [5, 6])


@every_mode
@every_place
def test_second_chunk_of_a_prefill(make_runner: MakeRunner, mode: str, place: str) -> None:
    """Whole chunks stay or go as the session's own count of tokens says; half a chunk never stays."""
    runner = make_runner("plain", mode)
    session = runner.start([5, 6, 7])
    with interrupted(stop_at(runner, place), calls=1):
        session.prefill(LONG, chunk=40)
    assert session.tokens in ([5, 6], [5, 6, *LONG[:40]])
    assert_holds(session, list(session.tokens))


@every_place
def test_commit_that_feeds_again(make_runner: MakeRunner, place: str) -> None:
    """In recompute mode a partial commit is a forward pass: after an interrupt nothing of the block stays."""
    runner = make_runner("plain", "recompute")
    session = runner.start([5, 6, 7])
    session.verify([1, 2, 3])
    with interrupted(stop_at(runner, place)):
        session.commit(2)
    assert_holds(session, [5, 6])


@pytest.mark.parametrize(
    ("operation", "seam"),
    [
        ("verify", "stack"),
        ("second verify", "stack"),
        ("second verify", "rollback"),
        ("commit", "rollback"),
        ("commit all", "rollback"),
    ],
)
def test_failure_between_the_passes(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, seam: str, operation: str
) -> None:
    """Tapes are stacked and states rolled back outside the forward pass; memory runs out there just as well.

    Whatever the session then says it holds, pending tokens dropped or kept, must be what it holds.
    """
    runner = make_runner("plain", "tape")
    session: Session = runner.start([5, 6, 7])

    def fail(*_: object) -> None:
        raise MemoryError

    if operation != "verify":
        session.verify([1, 2, 3])
    monkeypatch.setattr(cache, seam, fail)
    with pytest.raises(MemoryError):
        if "verify" in operation:
            session.verify([8, 9])
        else:
            session.commit(3 if operation == "commit all" else 2)
    monkeypatch.undo()
    if session.room < runner.max_length - session.length:
        session.commit(0)
    assert_holds(session, list(session.tokens))


@pytest.mark.parametrize("operation", ["commit", "long prefill", "restore", "restore into a longer buffer"])
@pytest.mark.parametrize("call", [1, 3])
def test_interrupt_while_states_are_put_in_place(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, operation: str, call: int
) -> None:
    """A new position reaches the layers one by one. Half way, the session is still at the old one or at the new."""
    session: Session = make_runner("plain", "tape").start([5, 6, 7])
    mark = session.snapshot()
    if operation == "restore into a longer buffer":
        session.prefill([9] * 600)
    session.verify([1, 2, 3])
    if operation != "commit":
        session.commit(3)
    original, calls = cache.RecurrentLayer.go_to, [0]

    def go_to(self: cache.RecurrentLayer, state: cache.LayerState, length: int) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        original(self, state, length)

    monkeypatch.setattr(cache.RecurrentLayer, "go_to", go_to)
    with pytest.raises(KeyboardInterrupt):
        if operation == "commit":
            session.commit(2)
        elif operation == "long prefill":
            session.prefill(LONG)
        else:
            session.restore(mark)
    monkeypatch.undo()
    assert_holds(session, list(session.tokens))
