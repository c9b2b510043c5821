"""Whatever was fed, kept, taken back and restored, a session is as if it had only ever seen the committed tokens."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.errors import SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from tests import reference
from tests.comparison import (
    TOLERANCE,
    assert_close,
    assert_holds,
    assert_same_tensors,
    fresh,
    held_tensors,
    perturbed,
)
from tests.examples import examples
from tests.tiny import VOCABULARY

MakeRunner = Callable[..., TargetRunner]
MODES = ["tape", "recompute"]

verifies = st.tuples(st.just("verify"), st.integers(1, 9))
#: A share of the pending tokens, so that shrinking goes to 0 and all of them is as likely as none.
commits = st.tuples(st.just("commit"), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
snapshots = st.tuples(st.just("snapshot"), st.just(0))
restores = st.tuples(st.just("restore"), st.integers(0, 9))
prefills = st.tuples(st.just("prefill"), st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 70])))
operations = st.lists(st.one_of(verifies, commits, verifies, commits, snapshots, restores, prefills), max_size=14)


class Driver:
    """Applies operations to a session, and to the plain list of tokens that it must hold afterwards."""

    def __init__(self, runner: TargetRunner, prompt: list[int], seed: int) -> None:
        self.session = runner.start(prompt)
        self.model = runner.model
        self.committed = list(prompt[:-1])
        self.pending: list[int] = []
        self.marks: list[tuple[object, list[int]]] = []
        self.random = random.Random(seed)

    def some_tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def apply(self, name: str, argument: float) -> None:
        getattr(self, name)(argument)
        assert self.session.tokens == self.committed

    def verify(self, count: int) -> None:
        block = self.some_tokens(count)
        logits = self.session.verify(block)
        self.pending += block
        exact = reference.next_logits(self.model, self.committed + self.pending)[-count:]
        assert_close(logits, exact, f"logits of {block} after {self.committed + self.pending[:-count]}")

    def commit(self, share: float) -> None:
        keep = round(share * len(self.pending))
        self.session.commit(keep)
        self.committed += self.pending[:keep]
        self.pending = []

    def snapshot(self, _: float) -> None:
        if self.pending:
            with pytest.raises(SessionError, match="commit"):
                self.session.snapshot()
        else:
            self.marks.append((self.session.snapshot(), list(self.committed)))

    def restore(self, index: int) -> None:
        if self.marks:
            mark, tokens = self.marks[index % len(self.marks)]
            self.session.restore(mark)
            self.committed, self.pending = list(tokens), []

    def prefill(self, count: int) -> None:
        tokens = self.some_tokens(count)
        if self.pending:
            with pytest.raises(SessionError, match="commit"):
                self.session.prefill(tokens)
        else:
            self.session.prefill(tokens)
            self.committed += tokens


@pytest.mark.parametrize("name", ["plain", "grouped", "draft"])
@examples(10)
@given(steps=operations, prompt=st.integers(1, 6), seed=st.integers(0, 2**20))
def test_any_sequence_of_operations(
    make_runner: MakeRunner, name: str, steps: list[tuple[str, float]], prompt: int, seed: int
) -> None:
    tape, recompute = (Driver(make_runner(name, mode), [7, 3, 9, 2, 8, 5][:prompt], seed) for mode in MODES)
    for step in steps:
        tape.apply(*step)
        recompute.apply(*step)
    for driver in (tape, recompute):
        if driver.pending:
            driver.commit(0.5)
    assert_same_tensors(tape.session, recompute.session)
    for driver in (tape, recompute):
        # Every mark is still good, in any order, also after all that came later; then the session itself.
        last = driver.session.snapshot()
        for mark, tokens in driver.marks:
            driver.session.restore(mark)
            assert_holds(driver.session, tokens)
        driver.session.restore(last)
        assert_holds(driver.session, driver.committed)


@pytest.mark.parametrize("mode", MODES)
def test_one_block_keeps_every_possible_number(make_runner: MakeRunner, mode: str) -> None:
    runner = make_runner("deep", mode)
    block = [11, 22, 33, 44, 55]
    for keep in range(len(block) + 1):
        session = runner.start([5, 6, 7])
        session.verify(block)
        session.commit(keep)
        assert_holds(session, [5, 6, *block[:keep]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", range(8))
def test_blocks_without_a_commit_add_up(make_runner: MakeRunner, mode: str, keep: int) -> None:
    """Three pending blocks of 1, 4 and 2 tokens: every count falls before, on or behind each border."""
    session = make_runner("plain", mode).start([5])
    tokens = [10, 20, 21, 22, 23, 30, 31]
    for block in (tokens[:1], tokens[1:5], tokens[5:]):
        session.verify(block)
    session.commit(keep)
    assert_holds(session, tokens[:keep])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 32, 33, 64, 512, 513, 600])
def test_prefill_of_any_length(make_runner: MakeRunner, mode: str, count: int) -> None:
    """Short prefills take the recorded form, long ones transformers' own in chunks: the same state, then a rollback."""
    runner = make_runner("grouped", mode)
    tokens = [(7 * i * i + i) % VOCABULARY for i in range(count)]
    session = runner.start([*tokens, 0])
    assert session.tokens == tokens
    exact = reference.next_logits(runner.model, [*tokens, 4, 9, 6])[-3:]
    assert_close(session.verify([4, 9, 6]), exact, "logits")
    session.commit(1)
    stepwise = runner.start([0])
    stepwise.prefill([*tokens, 4], chunk=100)
    assert_same_tensors(session, stepwise)
    assert_close(
        session.verify([8]), reference.next_logits(runner.model, [*tokens, 4, 8])[-1:], "logits after rollback"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_block_longer_than_the_buffer_grows_it(make_runner: MakeRunner, mode: str) -> None:
    """More than 512 pending tokens: buffers grow under a pending block and windows are copied out of it."""
    session = make_runner("draft", mode).start([5, 6])
    block = [(3 * i * i + i) % VOCABULARY for i in range(530)]
    session.verify(block)
    session.commit(517)
    assert_same_tensors(session, fresh(session, [5, *block[:517]]))


@pytest.mark.parametrize("mode", MODES)
def test_many_futures_of_one_mark_and_of_nested_marks(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode).start([5, 6, 7, 8])
    early = session.snapshot()
    session.prefill([40, 41])
    late = session.snapshot()
    for future in ([50, 51], [60, 61, 62], []):
        for mark, base in ((late, [5, 6, 7, 40, 41]), (early, [5, 6, 7]), (late, [5, 6, 7, 40, 41])):
            session.restore(mark)
            session.prefill(future)
            inner = session.snapshot()
            session.verify([70, 71])
            session.commit(1)
            session.restore(inner)
            assert_holds(session, [*base, *future])


@pytest.mark.parametrize("mode", MODES)
def test_restore_drops_a_pending_block(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode).start([5, 6])
    mark = session.snapshot()
    session.prefill([9])
    session.verify([1, 2, 3])
    session.restore(mark)
    assert_holds(session, [5])


@pytest.mark.parametrize("mode", MODES)
def test_a_mark_of_the_empty_sequence(make_runner: MakeRunner, mode: str) -> None:
    session = make_runner("plain", mode).start([5])
    mark = session.snapshot()
    session.prefill(list(range(40)))
    session.restore(mark)
    assert_holds(session, [])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_a_mark_of_another_session_is_refused_or_right(make_runner: MakeRunner, mode: str, prompt: list[int]) -> None:
    """Never silently wrong: both sessions hold what they say, or the foreign mark raises and changes nothing."""
    runner = make_runner("plain", mode)
    first, second = runner.start([1, 2, 3, 4]), runner.start(prompt)
    mark = first.snapshot()
    try:
        second.restore(mark)
    except SessionError:
        assert_holds(second, prompt[:-1])
        return
    # Both go on from the shared mark, alternately, with different tokens.
    second.prefill([20, 21])
    first.prefill([30, 31])
    assert_holds(second, [1, 2, 3, 20, 21])
    assert_holds(first, [1, 2, 3, 30, 31])


@pytest.mark.parametrize("mode", MODES)
def test_logits_stay_as_returned(make_runner: MakeRunner, mode: str) -> None:
    """A caller may keep logits across commits and later blocks."""
    session = make_runner("plain", mode).start([5, 6])
    logits = session.verify([1, 2, 3])
    copy = logits.clone()
    session.commit(1)
    session.verify([4, 5])
    assert (logits == copy).all()


def test_the_comparison_would_notice(make_runner: MakeRunner) -> None:
    """Every tensor is looked at, and differs by much more than the tolerance once one token differs."""
    for mode in MODES:
        session, other = (make_runner("plain", mode).start([*tokens, 0]) for tokens in ([5, 6, 7], [5, 6, 8]))
        ours, theirs = held_tensors(session), held_tensors(other)
        # Three linear layers with window and state, one attention layer with keys and values.
        assert len(ours) == 8
        for name, tensor in ours.items():
            assert (tensor - theirs[name]).abs().max() > 1000 * TOLERANCE * tensor.abs().max(), name
        perturbed(session)
        with pytest.raises(AssertionError):
            assert_same_tensors(session, fresh(session, [5, 6, 7]))


def test_states_stay_fp32_in_a_bf16_model(make_model: Callable) -> None:
    """Half-precision weights: the recurrent state keeps the precision that transformers keeps it in."""
    model = copy.deepcopy(make_model("plain")).to(torch.bfloat16)
    for mode in MODES:
        session: Session = TargetRunner(model, rollback=mode).start([5, 6, 7])
        session.verify([1, 2, 3])
        session.commit(1)
        states = [x for name, x in held_tensors(session).items() if name.endswith("state")]
        assert len(states) == 3
        assert {x.dtype for x in states} == {torch.float32}
