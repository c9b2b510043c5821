"""The wrapped functions: nobody but a recording session notices them, and sessions do not notice each other."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybridspec.decoding.loop import decode
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.hooks import adapters
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.pass_context import States, recording
from tests.comparison import assert_holds, assert_same_tensors
from tests.tiny import tiny_model

MakeRunner = Callable[..., TargetRunner]
MakeModel = Callable[..., PreTrainedModel]
PROMPT = [5, 17, 40, 8]


NAMES = {
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
}


def wrapped_names(module: ModuleType) -> set[str]:
    return {name for name in NAMES if hasattr(getattr(module, name), "__hybridspec_native__")}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The modeling file as transformers ships it, whatever was wrapped before; put back as it was afterwards."""
    for name in NAMES:
        function = getattr(modeling_qwen3_5, name)
        function = getattr(function, "__hybridspec_native__", function)
        assert not hasattr(function, "__hybridspec_native__"), f"{name} was wrapped twice"
        monkeypatch.setattr(modeling_qwen3_5, name, function)
    return modeling_qwen3_5


def generate(model: PreTrainedModel, count: int = 8) -> torch.Tensor:
    """transformers' own loop: logits of each of ``count`` tokens, prefill and one-token steps."""
    ids = torch.tensor([PROMPT * 3])
    options = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    return torch.cat(model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options).logits)


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    ids = torch.tensor([PROMPT * 3])
    loss = model(input_ids=ids, labels=ids).loss
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_wrapped_model_computes_the_same_bits(native: ModuleType, make_model: MakeModel) -> None:
    model = make_model("grouped")
    ids = torch.tensor([PROMPT * 20])
    before = (model(input_ids=ids).logits, generate(model), gradients(model))
    adapters.attach(model)
    assert wrapped_names(native) == NAMES
    after = (model(input_ids=ids).logits, generate(model), gradients(model))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))


def test_recording_takes_the_short_form(native: ModuleType, make_model: MakeModel) -> None:
    """The other tests here would pass if nothing was ever wrapped: a session must not run the native functions."""

    def spy(*_: object, **__: object) -> None:
        raise AssertionError("the native function ran")

    # Its self-test needs the real functions for a reference.
    runner = TargetRunner(make_model("plain"), rollback="tape")
    for name in NAMES:
        # The `native` fixture puts the real one back.
        setattr(native, name, spy)
    adapters.attach(runner.model)
    session = runner.start(PROMPT)
    session.verify([1])
    session.verify([1, 2, 3])
    session.commit(2)
    with pytest.raises(AssertionError, match="the native function ran"):
        make_model("plain")(input_ids=torch.tensor([PROMPT]))


def test_attaching_twice_wraps_once(native: ModuleType, make_model: MakeModel) -> None:
    first = adapters.attach(make_model("plain"))
    functions = {name: getattr(native, name) for name in NAMES}
    assert adapters.attach(make_model("deep")) == first
    assert functions == {name: getattr(native, name) for name in NAMES}
    for function in functions.values():
        assert not hasattr(function.__hybridspec_native__, "__hybridspec_native__")


def test_recompute_wraps_nothing(native: ModuleType, make_model: MakeModel) -> None:
    session = TargetRunner(make_model("plain"), rollback="recompute").start(PROMPT)
    session.verify([1, 2])
    session.commit(1)
    assert not wrapped_names(native)


def test_recording_ends_with_the_pass_that_failed(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("plain")
    session = runner.start(PROMPT)
    expected = generate(runner.model)
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(runner.model.model.layers[2], "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            session.verify([1, 2])
    assert torch.equal(generate(runner.model), expected)


@pytest.mark.parametrize("modes", [("tape", "tape"), ("tape", "recompute"), ("recompute", "recompute")])
def test_interleaved_sessions_do_not_meet(make_runner: MakeRunner, modes: tuple[str, str]) -> None:
    """Two sequences on one model, step by step, pending blocks open at the same time."""
    sessions = [make_runner("plain", mode).start(PROMPT[: 2 + i]) for i, mode in enumerate(modes)]
    committed = [PROMPT[: 1 + i] for i in range(2)]
    for step in range(4):
        blocks = [[10 * step + i + j for j in range(3)] for i in range(2)]
        for session, block in zip(sessions, blocks, strict=True):
            session.verify(block)
        for i, session in enumerate(reversed(sessions)):
            session.commit((step + i) % 4)
        for i in range(2):
            committed[1 - i] = committed[1 - i] + blocks[1 - i][: (step + i) % 4]
    for session, tokens in zip(sessions, committed, strict=True):
        assert_holds(session, tokens)


def test_generate_between_the_steps_of_a_session(make_runner: MakeRunner) -> None:
    runner = make_runner("plain")
    expected = generate(runner.model)
    session, undisturbed = runner.start(PROMPT), runner.start(PROMPT)
    for block, keep in (([1, 2, 3], 1), ([4], 1), ([5, 6], 0)):
        logits = session.verify(block)
        assert torch.equal(generate(runner.model), expected)
        session.commit(keep)
        assert torch.equal(generate(runner.model), expected)
        assert torch.equal(undisturbed.verify(block), logits)
        undisturbed.commit(keep)
    assert_same_tensors(session, undisturbed)


def test_generate_while_a_decode_generator_is_suspended(make_runner: MakeRunner) -> None:
    """A generator that stopped between two tokens must not leave recording on in the caller's context."""
    runner = make_runner("plain")
    expected = generate(runner.model)
    tokens = decode(runner, PROMPT, draft=SameArchitectureDraft(runner), k=3, max_new_tokens=9, stop_tokens=frozenset())
    collected = []
    for token in tokens:
        collected.append(token.id)
        assert torch.equal(generate(runner.model), expected)
    assert collected == [t.id for t in decode(runner, PROMPT, max_new_tokens=9, stop_tokens=frozenset())]


@contextmanager
def held_up(model: PreTrainedModel, thread_name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The thread of that name waits in the middle layer of its first pass: (it is there, let it go)."""
    arrived, go = threading.Event(), threading.Event()
    layer = model.model.layers[1]
    original = layer.forward

    def forward(*arguments: object, **options: object) -> object:
        if threading.current_thread().name == thread_name and not arrived.is_set():
            arrived.set()
            assert go.wait(60)
        return original(*arguments, **options)

    layer.forward = forward
    try:
        yield arrived, go
    finally:
        go.set()
        del layer.forward


def decoded(runner: TargetRunner, draft: TargetRunner, prompt: list[int]) -> list[int]:
    options = {"k": 3, "max_new_tokens": 15, "stop_tokens": frozenset()}
    return [token.id for token in decode(runner, prompt, draft=SameArchitectureDraft(draft), **options)]


def test_generate_in_another_thread_during_a_recorded_pass(make_runner: MakeRunner) -> None:
    """One thread stands in the middle of a recorded pass while this one runs the plain model, unrecorded."""
    runner = make_runner("plain")
    expected, results = generate(runner.model), []
    session = runner.start(PROMPT)
    logits = runner.start(PROMPT).verify([1, 2, 3])
    with held_up(runner.model, "recorder") as (arrived, go):
        thread = threading.Thread(target=lambda: results.append(session.verify([1, 2, 3])), name="recorder")
        thread.start()
        assert arrived.wait(60)
        assert torch.equal(generate(runner.model), expected)
        go.set()
        thread.join()
    assert torch.equal(results[0], logits)
    session.commit(2)
    assert_holds(session, [*PROMPT[:-1], 1, 2])


@pytest.mark.parametrize("mode", ["tape", "recompute"])
def test_two_threads_decode_as_if_alone(make_runner: MakeRunner, mode: str) -> None:
    """One starts and ends a whole generation while the other stands in the middle of a pass on the same model."""
    runner, draft = make_runner("plain", mode), make_runner("plain", mode, noise=0.1)
    prompts = {"slow": [5, 17, 40, 8], "quick": [60, 2, 9]}
    alone = {name: decoded(runner, draft, prompt) for name, prompt in prompts.items()}
    assert alone["slow"] != alone["quick"]
    together: dict[str, list[int]] = {}

    def work(name: str) -> None:
        together[name] = decoded(runner, draft, prompts[name])

    with held_up(runner.model, "slow") as (arrived, go):
        slow = threading.Thread(target=work, args=("slow",), name="slow")
        slow.start()
        assert arrived.wait(60)
        quick = threading.Thread(target=work, args=("quick",), name="quick")
        quick.start()
        quick.join()
        go.set()
        slow.join()
    assert together == alone


def test_many_threads_share_one_model(make_runner: MakeRunner) -> None:
    """No order is arranged here: three threads at once, switched as often as Python can."""
    runner = make_runner("plain")
    prompts = [[i, 3 * i + 1, 7] for i in range(3)]
    alone = [decoded(runner, runner, prompt) for prompt in prompts]
    together: list[list[int]] = [[] for _ in prompts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda i=i: together.__setitem__(i, decoded(runner, runner, prompts[i])))
            for i in range(len(prompts))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert together == alone


def test_threads_that_attach_at_once_wrap_once(native: ModuleType) -> None:
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        adapters.attach(tiny_model(layers=4, seed=1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in NAMES:
        assert not hasattr(getattr(native, name).__hybridspec_native__, "__hybridspec_native__")


@pytest.mark.parametrize("device, runs", [("meta", ["kernel"]), ("cpu", ["torch"])])
def test_a_long_prefill_runs_the_installed_kernel_but_on_the_cpu(device: str, runs: list[str]) -> None:
    """transformers binds an installed flash-linear-attention round its own function, for every device."""
    ran: list[str] = []

    def in_torch(query: torch.Tensor, **_: object) -> None:
        ran.append("torch")

    @functools.wraps(in_torch)
    def native(query: torch.Tensor, **_: object) -> None:
        ran.append("kernel")

    wrapped = adapters.RECURRENCES["torch_chunk_gated_delta_rule"](native)
    with recording("advance"):
        wrapped(torch.empty(1, 64, 2, 8, device=device))
    assert ran == runs


@pytest.mark.parametrize("device, first", [("meta", ["native"]), ("cpu", [])])
def test_only_the_first_chunk_of_a_selective_scan_may_run_the_kernel(device: str, first: list[str]) -> None:
    """It starts from zeros whatever the state is."""
    ran: list[str] = []

    def native(x: torch.Tensor, *_: object, **__: object) -> tuple:
        ran.append("native")
        return x, x

    wrapped = adapters.RECURRENCES["mamba_selective_scan"](native)
    x, rate, write = (torch.empty(*shape, device=device) for shape in ((1, 4, 40), (4, 3), (1, 3, 40)))
    for state in (None, torch.empty(1, 4, 3, device=device)):
        with recording("advance") as now:
            now.states = States(1)
            now.states[0] = state
            wrapped(x, x, rate, write, write, return_last_state=True)
            assert now.tapes == [None]
    assert ran == first
