"""Packed weights: the same passes within rounding, the same text, and clear errors where they cannot be."""

import copy
import gc
import io
import weakref

import pytest
import torch

from hybridspec.decoding.loop import decode
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import InputError
from hybridspec.runtime import packed
from hybridspec.runtime.runner import TargetRunner
from tests.families import some_tokens
from tests.tiny import tiny_model


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[TargetRunner, TargetRunner]:
    """A runner with packed weights, however small they are, and one on the same model without."""
    monkeypatch.setattr(packed, "LEAST", 1)
    model = copy.deepcopy(tiny_model())
    return TargetRunner(model, packed=True), TargetRunner(model)


@pytest.mark.parametrize("length", [1, 2, 5, 32, 33])
def test_a_pass_is_that_of_the_plain_weights(pair, length: int) -> None:
    prompt, block = some_tokens(9), some_tokens(length)
    logits, kept = [], []
    for runner in pair:
        with runner.start(prompt) as session:
            logits.append(session.verify(block))
            session.commit(max(1, length // 2))
            kept.append(session.verify(block[:3]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-4)


def test_one_token_and_other_runners_run_on_the_plain_weights(pair) -> None:
    ours, plain = pair
    assert ours.packed.bytes > 0 and plain.packed is None
    plain_calls: list[int] = []
    layer = next(m for m in ours.model.modules() if type(m) is torch.nn.Linear)

    def counted(x: torch.Tensor) -> torch.Tensor:
        plain_calls.append(x.shape[-2])
        return torch.nn.functional.linear(x, layer.weight, layer.bias)

    layer.forward.original = counted
    with ours.start(some_tokens(40)) as session:
        assert plain_calls == [39]
        for length in (1, 2, 6):
            session.verify(some_tokens(length))
            session.commit(length)
    assert plain_calls == [39, 1]
    with plain.start(some_tokens(9)) as session:
        session.verify(some_tokens(4))
    assert plain_calls == [39, 1, 8, 4]


def test_copies_and_files_of_the_model_have_no_packed_weights(pair) -> None:
    ours, _ = pair
    x = torch.tensor([some_tokens(4)])
    expected = ours.model(x).logits
    file = io.BytesIO()
    torch.save(ours.model, file)
    file.seek(0)
    for model in (copy.deepcopy(ours.model), torch.load(file, weights_only=False)):
        assert all(m.forward.__self__ is m for m in model.modules() if type(m) is torch.nn.Linear)
        torch.testing.assert_close(model(x).logits, expected)


def test_gradients_are_those_of_the_plain_weights(pair) -> None:
    ours, _ = pair
    with ours.packed.active():
        ours.model(torch.tensor([some_tokens(4)])).logits.sum().backward()
    assert all(p.grad is not None for p in ours.model.parameters())
    ours.model.zero_grad()


def test_packed_weights_end_with_their_runner(pair) -> None:
    _, plain = pair
    runner = TargetRunner(plain.model, packed=True)
    weights = weakref.ref(runner.packed)
    del runner
    gc.collect()
    assert weights() is None
    with plain.start(some_tokens(9)) as session:
        session.verify(some_tokens(4))


def test_speculative_text_is_plain_text(pair, make_runner) -> None:
    ours, plain = pair
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    alone = [token.id for token in decode(plain, some_tokens(9), max_new_tokens=24)]
    together = [token.id for token in decode(ours, some_tokens(9), draft=draft, k=4, max_new_tokens=24)]
    assert together == alone


@pytest.mark.parametrize(
    "settings, message",
    [({"dtype": torch.bfloat16}, "this model is bfloat16 on cpu"), ({"compile": True}, "choose one of them")],
)
def test_what_cannot_be_packed_is_refused(settings: dict, message: str) -> None:
    settings = dict(settings)
    model = copy.deepcopy(tiny_model()).to(settings.pop("dtype", torch.float32))
    with pytest.raises(InputError, match=message):
        TargetRunner(model, packed=True, **settings)
