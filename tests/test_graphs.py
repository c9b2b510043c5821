"""Graphs without a GPU: a stand-in notes the operations of a capture and repeats them, on the same tensors and without
their Python, as a CUDA graph does.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridspec.runtime.graphs import WARM_UPS, Graphs
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.static_runner import StaticRunner
from tests import families
from tests.comparison import assert_all_close, assert_close, held_tensors
from tests.test_static import static_tensors

CPU = torch.device("cpu")


class Recorded(TorchDispatchMode):
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        self.replays = 0
        #: Memory that the capture wrote, as it was before: a capture runs nothing.
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for function, args, options, result in self.operations:
            storages = {x.untyped_storage().data_ptr() for x in tree_leaves((args, options)) if torch.is_tensor(x)}
            fresh = [x for x in tree_leaves(result) if torch.is_tensor(x)]
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)
            if not writes and any(x.untyped_storage().data_ptr() in storages for x in fresh):
                # A view still looks at the same memory.
                continue
            again = [x for x in tree_leaves(function(*args, **options)) if torch.is_tensor(x)]
            for old, new in zip(fresh, again, strict=True):
                if old is not new:
                    old.copy_(new)

    def pool(self) -> None:
        return None


class NoStream:
    def wait_stream(self, _: object) -> None:
        pass


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """All of CUDA that a capture asks for, on the CPU."""
    made: list[Recorded] = []
    capturing = [False]

    def make() -> Recorded:
        made.append(Recorded())
        return made[-1]

    @contextlib.contextmanager
    def capture(graph: Recorded, **_: object) -> Iterator[None]:
        capturing[0] = True
        try:
            with graph:
                yield
            for storage, before in graph.before.values():
                storage.copy_(before)
        finally:
            capturing[0] = False

    monkeypatch.setattr(Graphs, "captures", lambda self, device: self.enabled)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    # Inference mode would hide what an operation consists of.
    monkeypatch.setattr(torch, "inference_mode", lambda on=True: torch.no_grad() if on else contextlib.nullcontext())
    return made


def test_a_capture_leaves_no_trace_and_a_replay_runs_no_python(recorded_graphs: list[Recorded]) -> None:
    total, given, calls = torch.zeros(3), torch.ones(3), []

    def add() -> torch.Tensor:
        calls.append(1)
        total.add_(given)
        return total * 2

    graphs = Graphs()
    for count in range(1, 4):
        given.fill_(count)
        result = graphs.run("add", add, CPU, [total])
        assert total.tolist() == [sum(range(count + 1))] * 3
        assert torch.equal(result, 2 * total)
    assert len(calls) == WARM_UPS + 1
    assert recorded_graphs[0].replays == 3
    assert graphs.captured == {"add"}


def test_what_cannot_be_captured_runs_as_it_is_after_a_warning(recorded_graphs: list[Recorded]) -> None:
    total, calls = torch.zeros(1), []

    def add() -> int:
        calls.append(1)
        total.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return len(calls)

    graphs = Graphs()
    with pytest.warns(UserWarning, match=r"no CUDA graph of add: operation not permitted .* runs without one"):
        graphs.run("add", add, CPU, [total])
    assert total.item() == 1
    assert graphs.run("add", add, CPU, [total]) == len(calls)
    assert total.item() == 2
    assert not graphs.captured


def test_graphs_that_are_switched_off_capture_nothing(recorded_graphs: list[Recorded]) -> None:
    assert Graphs(enabled=False).run("key", lambda: 5, CPU) == 5
    assert not recorded_graphs


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        "falcon_h1",
        "gemma3_text",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("bamba", "jamba", "kimi_linear", "qwen3_5_moe_text")),
    ],
)
def test_replayed_verify_passes_and_commits(name: str, recorded_graphs: list[Recorded]) -> None:
    """Every block and commit from the second time on is a replay: nothing may depend on what Python knew at its capture
    but what the key tells. Positions, what is kept and the states are others each time.
    """
    ordinary: TargetRunner = families.family_runner(name, "tape")
    static = StaticRunner(ordinary.model, capacity=160)
    pair = [runner.start(families.some_tokens(36)) for runner in (static, ordinary)]
    seed = itertools.count()
    for keep in (2, 4, 0, 1, 4, 4, 3, 2, 1, 4, 2):
        block = families.some_tokens(4, seed=next(seed))
        assert_close(*(session.verify(block) for session in pair), "logits")
        for session in pair:
            session.commit(keep)
        assert_all_close(static_tensors(pair[0]), held_tensors(pair[1]))
    # Blocks that add up write the plane that they read.
    for keep in (3, 1, 2, 3):
        for size in (2, 1):
            block = families.some_tokens(size, seed=next(seed))
            assert_close(*(session.verify(block) for session in pair), "logits")
        for session in pair:
            session.commit(keep)
        assert_all_close(static_tensors(pair[0]), held_tensors(pair[1]))
    arena = pair[0].cache.arena
    # Attention layers have nothing to take back but a length.
    assert {key[0] for key in arena.graphs.captured} == ({"verify", "commit"} if arena.recurrent else {"verify"})
    assert sum(graph.replays for graph in recorded_graphs) > 2 * len(recorded_graphs)
