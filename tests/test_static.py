"""A static session is as if it were an ordinary one, at addresses that never change, and waits for nothing."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.decoding.loop import decode
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import ContextLengthError, InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.graphs import Graphs
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.static_runner import StaticRunner
from hybridspec.state.static_layers import StaticAttentionLayer
from tests import families
from tests.comparison import assert_all_close, assert_close, held_tensors
from tests.examples import examples
from tests.static import CAPACITY, REFUSED, assert_same, every_family, runners, some_tokens, static_tensors
from tests.tiny import VOCABULARY, tiny_model

MakeModel = Callable


verifies = st.tuples(st.just("verify"), st.integers(1, 9))
commits = st.tuples(st.just("commit"), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
snapshots = st.tuples(st.just("snapshot"), st.just(0))
restores = st.tuples(st.just("restore"), st.integers(0, 9))
prefills = st.tuples(st.just("prefill"), st.one_of(st.integers(1, 9), st.sampled_from([32, 33, 40])))
operations = st.lists(st.one_of(verifies, commits, verifies, commits, snapshots, restores, prefills), max_size=10)


@examples(25)
@given(operations, st.integers(1, 60), st.integers(0, 2**31))
def test_any_sequence_of_operations(steps: list[tuple[str, float]], prompt: int, seed: int) -> None:
    pair = [runner.start(some_tokens(prompt, seed)) for runner in runners()]
    draw = random.Random(seed)
    marks: list[list] = []
    for name, argument in steps:
        static, ordinary = pair
        if name in ("snapshot", "prefill") and static.cache.pending:
            for session in pair:
                session.commit(session.cache.pending // 2)
        if name == "verify" and static.cache.pending + argument <= 32:
            block = draw.choices(range(3, VOCABULARY), k=argument)
            assert_close(*(session.verify(block) for session in pair), "logits")
        elif name == "commit":
            keep = round(argument * static.cache.pending)
            for session in pair:
                session.commit(keep)
        elif name == "snapshot":
            marks.append([session.snapshot() for session in pair])
        elif name == "restore" and marks:
            for session, mark in zip(pair, marks[argument % len(marks)], strict=True):
                session.restore(mark)
        elif name == "prefill" and static.room > argument:
            tokens = draw.choices(range(3, VOCABULARY), k=argument)
            for session in pair:
                session.prefill(tokens)
        if not static.cache.pending:
            assert_same(*pair)
    for session in pair:
        session.commit(session.cache.pending)
    assert_same(*pair)


@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 32])
def test_every_number_of_kept_tokens(tokens: int) -> None:
    prompt, block = some_tokens(40), some_tokens(tokens, seed=1)
    for keep in sorted({0, 1, tokens // 2, tokens - 1, tokens}):
        static, ordinary = (runner.start(prompt) for runner in runners())
        assert_close(static.verify(block), ordinary.verify(block), "logits")
        for session in (static, ordinary):
            session.commit(keep)
        assert_same(static, ordinary)


@every_family
def test_every_family_with_a_tape(name: str) -> None:
    """Prefill, blocks that add up, partial and full commits, and a single token."""
    static, ordinary = (runner.start(families.some_tokens(36)) for runner in runners(name))
    for blocks, keep in (((5,), 2), ((3,), 3), ((1,), 1), ((2, 2), 3), ((1, 1), 2)):
        for count in blocks:
            block = families.some_tokens(count, seed=count + keep)
            assert_close(static.verify(block), ordinary.verify(block), "logits")
        for session in (static, ordinary):
            session.commit(keep)
        assert_same(static, ordinary)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_layers_without_a_fixed_size_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedLayerError, match="fixed size"):
        StaticRunner(families.family_model(name), capacity=CAPACITY)


def test_the_comparison_would_notice() -> None:
    static, ordinary = (runner.start(some_tokens(20)) for runner in runners())
    for tensor in list(static_tensors(static).values()):
        tensor.add_(1)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(static, ordinary)


def test_decoding_with_static_target_and_draft() -> None:
    prompt = some_tokens(12)
    target, draft = tiny_model(layers=4, seed=1), tiny_model(layers=4, seed=1, spread=0.06)
    outputs = []
    for make in (lambda m: StaticRunner(m, capacity=CAPACITY), lambda m: TargetRunner(m, rollback="tape")):
        steps = list(decode(make(target), prompt, draft=SameArchitectureDraft(make(draft)), k=3, max_new_tokens=40))
        outputs.append([token.id for token in steps])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 8


def test_a_longer_pending_block_is_refused_and_leaves_all_intact() -> None:
    static, ordinary = (runner.start(some_tokens(40)) for runner in runners())
    with pytest.raises(ContextLengthError, match="33 pending tokens are more than the 32 .* raise longest"):
        static.verify(some_tokens(33))
    assert_same(static, ordinary)


def test_the_capacity_ends_a_sequence() -> None:
    session = runners()[0].start(some_tokens(CAPACITY - 1))
    with pytest.raises(ContextLengthError):
        session.verify(some_tokens(3))
    session.verify(some_tokens(2))


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_capacity_that_is_none(capacity: int) -> None:
    with pytest.raises(InputError, match=f"not {capacity}"):
        StaticRunner(tiny_model(layers=4, seed=1), capacity=capacity)


def test_an_interrupted_restore_must_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    static, ordinary = (runner.start(some_tokens(40)) for runner in runners())
    mark = static.snapshot()
    static.prefill(some_tokens(5))
    with monkeypatch.context() as patch:
        patch.setattr(StaticAttentionLayer, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            static.restore(mark)
    with pytest.raises(SessionError, match="restore a mark again"):
        static.verify([3])
    static.restore(mark)
    assert_same(static, ordinary)


def test_graphs_are_what_they_stand_for_where_there_is_no_cuda() -> None:
    graphs, calls = Graphs(), []
    for _ in range(3):
        assert graphs.run("key", lambda: calls.append(1) or len(calls), torch.device("cpu")) == len(calls)
    assert len(calls) == 3
    assert not graphs.captured


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_captured_graphs_compute_what_the_model_computes(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSPEC_KERNELS", choice)
    model = copy.deepcopy(tiny_model(layers=4, seed=1)).cuda()
    static, ordinary = StaticRunner(model, capacity=CAPACITY), TargetRunner(model, rollback="tape")
    pair = [runner.start(some_tokens(40)) for runner in (static, ordinary)]
    for tokens, keep in [(5, 3), (5, 5), (5, 0), (1, 1), (5, 2), (1, 1), (5, 4), (5, 5), (5, 1)]:
        block = some_tokens(tokens, seed=tokens + keep)
        assert_close(*(session.verify(block) for session in pair), "logits", 1e-4)
        for session in pair:
            session.commit(keep)
        ours, theirs = static_tensors(pair[0]), held_tensors(pair[1])
        assert_all_close(ours, theirs, 1e-4)
    captured = pair[0].cache.arena.graphs.captured
    assert {key[0] for key in captured} == {"verify", "commit"}
    assert not pair[0].cache.arena.graphs._refused
    # A graph of a second block reads and writes the same plane.
    for _ in range(3):
        for block in ([3, 4], [5]):
            assert_close(*(session.verify(block) for session in pair), "logits", 1e-4)
        for session in pair:
            session.commit(2)
        assert_all_close(static_tensors(pair[0]), held_tensors(pair[1]), 1e-4)
