"""What a CUDA graph of a static session needs: addresses that never change, and no wait for the device."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridspec.runtime.session import Session
from hybridspec.runtime.static_runner import StaticRunner
from hybridspec.state.base import PassOutput
from hybridspec.state.pass_context import recording
from tests import families
from tests.comparison import assert_all_close
from tests.static import CAPACITY, every_family, runners, some_tokens
from tests.tiny import tiny_model


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
