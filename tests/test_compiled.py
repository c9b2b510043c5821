"""Compiled passes compute what the model itself computes, and a model that cannot be compiled runs without them."""

import warnings
from collections.abc import Callable

import pytest
import torch

from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime import compiled
from hybridspec.runtime.compile_ahead import compile_ahead
from hybridspec.runtime.runner import TargetRunner
from tests.comparison import assert_close, assert_same_tensors
from tests.drafting import generate
from tests.families import family_model
from tests.tiny import VOCABULARY, noisy_copy, tiny_model

#: One for each recurrence, for convolutions alone, for both kinds of layers in one, and for sliding windows.
FAMILIES = ("olmo_hybrid", "granitemoehybrid", "jamba", "lfm2", "falcon_h1", "minimax+linear_first", "kimi_linear")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as they were traced: the compiler, which takes minutes, has tests of its own."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)


def text(count: int, vocabulary: int = VOCABULARY) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def walk(runner: TargetRunner, plain: TargetRunner, tokens: list[int], steps: list[tuple[int, int]]) -> None:
    """Verifies blocks and keeps some of each, compiled and not, and compares logits and what follows."""
    with runner.start(tokens[:40]) as ours, plain.start(tokens[:40]) as theirs:
        for size, keep in steps:
            block = tokens[ours.length : ours.length + size]
            assert_close(ours.verify(block), theirs.verify(block), "logits", 1e-4)
            ours.commit(keep)
            theirs.commit(keep)
            assert_same_tensors(ours, theirs, 1e-3)


STEPS = [(1, 1), (1, 1), (5, 5), (5, 2), (4, 3), (4, 0), (3, 3), (2, 1), (1, 1), (5, 4)]


def test_programs_compute_what_the_model_computes(traced: None) -> None:
    model = tiny_model()
    runner = TargetRunner(model, compile=True)
    walk(runner, TargetRunner(model), text(90), STEPS)
    assert set(runner.compiled.programs) == {1, 2, 3, 5} and all(runner.compiled.programs.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer(name: str, traced: None) -> None:
    """A family either runs compiled or says why not; its results are right in both cases."""
    model = family_model(name)
    runner = TargetRunner(model, compile=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        walk(runner, TargetRunner(model), text(60, 90), STEPS[:6])
    told = any("runs uncompiled" in str(w.message) for w in caught)
    assert told != all(runner.compiled.programs.values())


def test_one_program_serves_buffers_of_every_size(traced: None) -> None:
    model = tiny_model()
    runner, plain = TargetRunner(model, compile=True), TargetRunner(model)
    tokens = text(1300)
    for start in (30, 600, 505):
        with runner.start(tokens[:start]) as ours, plain.start(tokens[:start]) as theirs:
            for _ in range(6):
                block = tokens[ours.length : ours.length + 5]
                assert_close(ours.verify(block), theirs.verify(block), "logits", 1e-4)
                ours.commit(3)
                theirs.commit(3)


def test_blocks_add_up_and_marks_stay(traced: None) -> None:
    model = tiny_model()
    runner, plain = TargetRunner(model, compile=True), TargetRunner(model)
    tokens = text(90)
    with runner.start(tokens[:20]) as ours, plain.start(tokens[:20]) as theirs:
        marks = [s.snapshot() for s in (ours, theirs)]
        for keep in (7, 4, 1, 0):
            for block in (tokens[20:21], tokens[21:25], tokens[25:27]):
                assert_close(ours.verify(block), theirs.verify(block), "logits", 1e-4)
            ours.commit(keep)
            theirs.commit(keep)
            assert_close(ours.verify(tokens[40:45]), theirs.verify(tokens[40:45]), "logits", 1e-4)
            ours.restore(marks[0])
            theirs.restore(marks[1])


def test_speculation_gives_the_plain_tokens(traced: None) -> None:
    target, draft = tiny_model(), noisy_copy(0.3)
    expected = generate(TargetRunner(target), text(20), 40)
    compiled_draft = SameArchitectureDraft(TargetRunner(draft, compile=True))
    run = generate(TargetRunner(target, compile=True), text(20), 40, compiled_draft, 3)
    assert run.tokens == expected.tokens
    assert 0 < sum(accepted for _, accepted in run.steps) < sum(drafted for drafted, _ in run.steps)


def wrong_results(graph: Callable, inputs: list) -> Callable:
    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        logits, *rest = graph(*tensors)
        return [logits + 1.0, *rest]

    return program


def no_compiler(graph: Callable, inputs: list) -> Callable:
    raise RuntimeError("no C++ compiler")


@pytest.mark.parametrize(("compiler", "reason"), [(wrong_results, "off by"), (no_compiler, "no C\\+\\+ compiler")])
def test_what_cannot_be_compiled_runs_uncompiled(
    compiler: Callable, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "compile", compiler)
    model = tiny_model()
    runner = TargetRunner(model, compile=True)
    with pytest.warns(UserWarning, match=reason):
        walk(runner, TargetRunner(model), text(60), [(1, 1), (1, 1), (1, 1)])
    assert runner.compiled.programs == {1: None}


@pytest.mark.parametrize("rollback", ["tape", "slots"])
def test_programs_are_made_ahead_and_no_others_later(rollback: str, traced: None) -> None:
    model, told = tiny_model(layers=2, layer_types=("linear_attention", "full_attention")), []
    runner = TargetRunner(model, rollback=rollback, compile=True)
    compile_ahead(runner, [SameArchitectureDraft(TargetRunner(model, compile=True))], 2, told.append)
    made = dict(runner.compiled.programs)
    assert set(made) == {1, 2, 3} and all(made.values())
    # Three of the target, two of the draft.
    assert len(told) == 5 and "block length 3, 3 of 3" in told[2]
    walk(runner, TargetRunner(model), text(60), [(1, 1), (3, 2), (2, 0), (5, 4)])
    assert runner.compiled.programs == made


def test_a_model_that_cannot_be_compiled_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(layers=2, layer_types=("linear_attention", "full_attention"))
    with pytest.raises(UnsupportedLayerError, match="rollback 'recompute'.*Leave out --compile"):
        TargetRunner(model, rollback="recompute", compile=True).compiled.prepare(2)
    monkeypatch.setattr(torch._inductor, "compile", no_compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnsupportedLayerError, match="a pass of 1 token: .*no C\\+\\+ compiler"):
            TargetRunner(model, compile=True).compiled.prepare(2)


@pytest.mark.slow
def test_the_compiler_itself() -> None:
    model = tiny_model(layers=2, layer_types=("linear_attention", "full_attention"))
    runner = TargetRunner(model, compile=True)
    walk(runner, TargetRunner(model), text(60), [(1, 1), (1, 1), (1, 1), (4, 2), (5, 3)])
    assert set(runner.compiled.programs) == {1, 5} and all(runner.compiled.programs.values())


def test_longest_blocks_run_uncompiled(traced: None) -> None:
    runner = TargetRunner(tiny_model(), compile=True)
    with runner.start(text(40)) as session:
        session.verify(text(compiled.LENGTHS[-1] + 1))
    assert not runner.compiled.programs
