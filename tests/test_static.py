"""A static session is as if it were an ordinary one, at addresses that never change, and waits for nothing."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridspec.decoding.loop import decode
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import ContextLengthError, InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.graphs import Graphs
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.runtime.static_runner import StaticRunner
from hybridspec.state.base import PassOutput
from hybridspec.state.pass_context import recording
from hybridspec.state.static_layers import StaticAttentionLayer, StaticRecurrentLayer
from tests import families
from tests.comparison import assert_all_close, assert_close, held_tensors
from tests.examples import examples
from tests.tiny import VOCABULARY, tiny_model

MakeModel = Callable
CAPACITY = 256
#: Families whose layers have no fixed size here: a sparse-attention indexer, or layers that appear as the model runs.
REFUSED = {"qwen4_exp_text", "qwen4_exp_text+ple", "glm5_next", "inkling2_loop_text"}

#: One of each kind of layer; the others are tried under slow.
USUAL = {
    "qwen3_5",
    "kimi_linear",
    "bamba",
    "nemotron_h+clamped",
    "falcon_h1",
    "jamba",
    "zamba",
    "minimax+linear_first",
    "recurrent_gemma",
    "lfm2",
    "inkling_text",
    "gemma3_text",
    "qwen3_5_moe_text",
}
every_family = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow)
        for name in families.FAMILIES
        if name not in families.WITHOUT_TAPE | REFUSED
    ],
)

verifies = st.tuples(st.just("verify"), st.integers(1, 9))
commits = st.tuples(st.just("commit"), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
snapshots = st.tuples(st.just("snapshot"), st.just(0))
restores = st.tuples(st.just("restore"), st.integers(0, 9))
prefills = st.tuples(st.just("prefill"), st.one_of(st.integers(1, 9), st.sampled_from([32, 33, 40])))
operations = st.lists(st.one_of(verifies, commits, verifies, commits, snapshots, restores, prefills), max_size=10)

RUNNERS: dict[str, tuple[StaticRunner, TargetRunner]] = {}


def runners(name: str = "plain") -> tuple[StaticRunner, TargetRunner]:
    """The same model, static and ordinary."""
    if name not in RUNNERS:
        if name == "plain":
            ordinary = TargetRunner(tiny_model(layers=4, seed=1), rollback="tape")
        else:
            ordinary = families.family_runner(name, "tape")
        RUNNERS[name] = StaticRunner(ordinary.model, capacity=CAPACITY), ordinary
    return RUNNERS[name]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def static_tensors(session: Session) -> dict[str, Tensor]:
    """What :func:`held_tensors` tells of an ordinary session: all that decides what is computed next."""
    cache = session.cache
    cache.show()
    assert cache.arena.place.length == session.length
    held: dict[str, Tensor | None] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticAttentionLayer) and layer.keys is not None:
            window = layer.sliding_window
            seen = slice(0 if window is None else max(0, session.length - window + 1), session.length)
            held |= {f"{index} keys": layer.keys[..., seen, :], f"{index} values": layer.values[..., seen, :]}
        if isinstance(layer, StaticRecurrentLayer):
            for which, window in layer.conv_states.items():
                held[f"{index} window {which}" if which else f"{index} window"] = window
            for which, state in layer.recurrent_states.items():
                held[f"{index} state {which}" if which else f"{index} state"] = state
    return {name: x for name, x in held.items() if x is not None and x.numel() and x.any()}


def assert_same(static: Session, ordinary: Session) -> None:
    assert static.tokens == ordinary.tokens
    assert_all_close(static_tensors(static), held_tensors(ordinary))


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


def addresses(session: Session) -> list[int]:
    return [x.data_ptr() for x in session.cache.arena.tensors()]


def test_addresses_never_change() -> None:
    """Over blocks of all lengths, every kind of commit, a prefill in the long form, and the sessions that follow."""
    runner = StaticRunner(tiny_model(layers=4, seed=1), capacity=CAPACITY)
    session = runner.start(some_tokens(40))
    session.verify(some_tokens(3))
    session.commit(2)
    fixed = addresses(session)
    assert len(fixed) == len(set(fixed)) > 10
    for tokens in (1, 2, 5, 9):
        for keep in range(0, tokens + 1, 2):
            session.verify(some_tokens(tokens))
            session.commit(keep)
            assert addresses(session) == fixed
    mark = session.snapshot()
    session.prefill(some_tokens(50))
    session.restore(mark)
    assert addresses(session) == fixed
    arena = session.cache.arena
    session.close()
    with runner.start(some_tokens(10)) as second, runner.start(some_tokens(10)) as third:
        assert second.cache.arena is arena
        assert addresses(second) == fixed
        assert third.cache.arena is not arena


class Operations(TorchDispatchMode):
    """Notes what runs on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.names.append(function.overloadpacket._qualified_op_name.removeprefix("aten::"))
        by_index = self.names[-1] in ("index", "index_put", "index_put_")
        if by_index and any(x.dtype == torch.bool for x in args[1] if x is not None):
            # A GPU has to count first.
            self.names.append("nonzero")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep, runs", [(5, False), (0, False), (3, True)])
def test_keeping_all_or_nothing_copies_nothing(keep: int, runs: bool) -> None:
    session = runners()[0].start(some_tokens(40))
    session.verify(some_tokens(5))
    with Operations() as operations:
        session.commit(keep)
    assert bool(operations.names) is runs


def test_a_partial_commit_writes_the_other_plane_only() -> None:
    session = runners()[0].start(some_tokens(40))
    session.verify(some_tokens(5))
    arena = session.cache.arena
    parity = arena.place.parity
    before = [x.clone() for x in arena.tensors()]
    session.commit(3)
    changed = {x.data_ptr() for x, old in zip(arena.tensors(), before, strict=True) if not torch.equal(x, old)}
    planes = [group.planes for group in arena.groups]
    planes += [p for layer in arena.recurrent for p in layer.conv_states.planes.values()]
    assert changed == {pair[1 - parity].data_ptr() for pair in planes}


@pytest.mark.parametrize(
    "name", ["qwen3_5", "bamba", "jamba", "kimi_linear", "recurrent_gemma", "minimax+linear_first"]
)
def test_the_number_kept_may_stay_on_the_device(name: str) -> None:
    """What a graph of a commit runs equals what the CPU runs."""
    session = runners(name)[0].start(families.some_tokens(36))
    session.verify(families.some_tokens(4))
    session.verify(families.some_tokens(3))
    arena = session.cache.arena
    for keep in range(1, 7):
        settled = []
        for count in (keep, torch.tensor([[keep]])):
            arena.settle(count)
            arena.place.parity, place = arena.place.other, arena.place.parity
            settled.append({i: x.clone() for i, x in enumerate(arena.tensors())})
            arena.place.parity = place
        assert_all_close(*settled)


#: What cannot be captured: it looks at a value, its size depends on one, or it makes a tensor of Python's values.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_consecutive",
    "_unique2",
    "equal",
    "lift_fresh",
}


@contextmanager
def capturing(patch: pytest.MonkeyPatch) -> Iterator[Operations]:
    """As transformers sees it while a stream is captured."""
    from transformers import masking_utils

    patch.setattr(masking_utils, "is_tracing", lambda *_: True)
    with Operations() as operations:
        yield operations


@every_family
def test_a_pass_looks_at_no_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of one token and of several, and a commit, as they would be captured."""
    session = runners(name)[0].start(families.some_tokens(36))
    for tokens in (1, 4):
        assert not waits(session, tokens, monkeypatch)
    session.cache.end_block(4)
    keep = torch.tensor([[1]])
    with Operations() as operations:
        session.cache.arena.settle(keep)
    assert not WAITS & set(operations.names)


def as_it_is(runner: StaticRunner) -> Callable[..., PassOutput]:
    """A pass of the model alone, outside of inference mode."""
    return lambda cache, block, last_only: PassOutput(runner.call(block, cache).logits)


def waits(session: Session, tokens: int, patch: pytest.MonkeyPatch) -> set[str]:
    session.cache.begin_block()
    session.cache.arena.ids.fill_(5)
    # Not in inference mode, which would hide what an operation consists of.
    with recording(), torch.no_grad(), capturing(patch) as operations:
        session.cache.run_pass(as_it_is(session.runner), tokens)
    assert len(operations.names) > 100
    return WAITS & set(operations.names)


def test_a_pass_that_looks_at_values_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop over the experts that were chosen; transformers' default groups them on the device."""
    model = copy.deepcopy(families.family_model("qwen3_5_moe_text"))
    session = StaticRunner(model, capacity=64).start(families.some_tokens(6))
    assert not waits(session, 4, monkeypatch)
    model.config._experts_implementation = "eager"
    assert "nonzero" in waits(session, 4, monkeypatch)


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
