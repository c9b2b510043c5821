"""transformers' own ``generate`` on enabled models: assisted output is plain output, no state goes stale, and a model
that is disabled again is as before.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from hybridspec import enable_assisted_generation
from hybridspec.decoding.assisted_generation import CACHE
from tests.assisted import COUNT, DRAFTED, LONG, SHORT, Echo, assert_same_tokens, generate, noisy, target, varied
from tests.families import CLAMPED, wrong
from tests.reference import next_logits

#: One of each kind; ``gemma3_text`` and ``lfm3`` go past their sliding windows of 8 tokens.
FAMILIES = [
    "qwen3_5_text",
    "kimi_linear",
    "jamba",
    "mamba",
    "mamba2",
    "bamba",
    "nemotron_h+clamped",
    "falcon_h1",
    "zamba2+clamped",
    "minimax+linear_first",
    "recurrent_gemma",
    "lfm2",
    "lfm3",
    "qwen3",
    "gemma3_text",
]

Steps = list[tuple[int, int]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Numbers of drafted and accepted tokens of each step, as transformers counts them."""
    taken: Steps = []
    for name in ("AssistedCandidateGenerator", "PromptLookupCandidateGenerator"):
        kind = getattr(candidate_generator, name)

        def count(self: Any, ids: Tensor, scores: Tensor, accepted: int, native: Callable) -> None:
            taken.append((scores.shape[1] - 1, int(accepted)))
            native(self, ids, scores, accepted)

        native = kind.update_candidate_strategy
        monkeypatch.setattr(kind, "update_candidate_strategy", functools.partialmethod(count, native=native))
    return taken


class Draft(NamedTuple):
    """What an assistant was asked to continue, and its answer with the logits behind it."""

    text: list[int]
    tokens: list[int]
    logits: Tensor


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """All that assistants say, left as it is."""
    return _listen(monkeypatch, spoil=False)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """All that assistants say. On its way to the target one token of every other draft is changed, the first included:
    that many tokens before it are right, see :func:`left`.
    """
    return _listen(monkeypatch, spoil=True)


def left(drafts: list[Draft]) -> list[int]:
    """How many tokens of each draft are right after spoiling."""
    return [len(d.tokens) if step % 2 else step // 2 % len(d.tokens) for step, d in enumerate(drafts)]


def _listen(monkeypatch: pytest.MonkeyPatch, spoil: bool) -> list[Draft]:
    heard: list[Draft] = []
    native = candidate_generator.AssistedCandidateGenerator.get_candidates

    def get_candidates(self: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        drafted, logits = native(self, ids, **options)
        start = ids.shape[1]
        if drafted.shape[1] > start:
            heard.append(Draft(ids[0].tolist(), drafted[0, start:].tolist(), logits[0]))
            at = left(heard)[-1]
            if spoil and start + at < drafted.shape[1]:
                drafted = drafted.clone()
                drafted[0, start + at] = wrong([int(drafted[0, start + at])])[0]
        return drafted, logits

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", get_candidates)
    return heard


def assert_exact(model: PreTrainedModel, drafts: list[Draft]) -> None:
    """As from a model that reads each text anew."""
    for draft in drafts:
        exact = next_logits(model, draft.text + draft.tokens)[-len(draft.tokens) - 1 : -1]
        error = (draft.logits - exact).abs().max().item()
        assert error <= 1e-3 * exact.std().item(), f"after {len(draft.text)} tokens the logits are off by {error:.1e}"


def assert_some_accepted_and_some_not(steps: Steps) -> None:
    drafted, accepted = (sum(numbers) for numbers in zip(*steps, strict=True))
    assert 0 < accepted < drafted, f"{accepted} of {drafted} accepted: such a run shows nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup(name: str, steps: Steps) -> None:
    model, options = target(name), {"logits_processor": LogitsProcessorList([Echo()])}
    text, plain = varied(model, LONG, **options)
    enable_assisted_generation(model)
    tokens = generate(model, text, prompt_lookup_num_tokens=DRAFTED, max_matching_ngram_size=1, **options)
    assert_same_tokens(model, text, tokens, plain)
    assert_some_accepted_and_some_not(steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_assistant_that_is_now_right_now_wrong(name: str, steps: Steps) -> None:
    model = target(name)
    text, plain = varied(model, LONG)
    enable_assisted_generation(model)
    assert_same_tokens(model, text, generate(model, text, assistant_model=noisy(name)), plain)
    assert_some_accepted_and_some_not(steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_own_assistant_is_always_right(name: str, steps: Steps, spoilt: list[Draft]) -> None:
    """A stale assistant never shows in the output, only in what is accepted: here all that is not spoilt on its way.

    The first step takes back the last token of the prompt.
    """
    model = target(name)
    text, plain = varied(model, LONG)
    enable_assisted_generation(model)
    assert_same_tokens(model, text, generate(model, text, assistant_model=model), plain)
    assert [accepted for drafted, accepted in steps if drafted] == left(spoilt)
    assert sum(accepted for _, accepted in steps) >= COUNT // 3
    if name not in CLAMPED:
        assert_exact(model, spoilt)


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "zamba2+clamped"])
def test_own_assistant_without_any_rejection(name: str, steps: Steps) -> None:
    model = target(name)
    text, plain = varied(model, SHORT)
    enable_assisted_generation(model)
    assert_same_tokens(model, text, generate(model, text, assistant_model=model), plain)
    assert all(drafted == accepted for drafted, accepted in steps)
    assert sum(accepted for _, accepted in steps) >= COUNT // 2


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
@pytest.mark.parametrize("enable_target", [False, True])
def test_hybrid_assistant_of_a_dense_target(name: str, enable_target: bool, drafts: list[Draft], steps: Steps) -> None:
    """The target alone is enabled, or the assistant alone. Whatever is rejected, drafts are those of a fresh model."""
    model, draft = target("qwen3"), target(name)
    text, plain = varied(model, LONG)
    enable_assisted_generation(model if enable_target else draft)
    assert_same_tokens(model, text, generate(model, text, assistant_model=draft), plain)
    assert any(accepted < drafted for drafted, accepted in steps)
    assert len(drafts) > COUNT // 2
    assert_exact(draft, drafts)


def test_assistant_that_is_not_enabled_is_served_and_left_alone(steps: Steps, spoilt: list[Draft]) -> None:
    model, draft = target("jamba"), target("jamba")
    before = dict(vars(draft))
    text, plain = varied(model, SHORT)
    enable_assisted_generation(model)
    assert_same_tokens(model, text, generate(model, text, assistant_model=draft), plain)
    assert [accepted for drafted, accepted in steps if drafted] == left(spoilt)
    assert vars(draft) == before
    with pytest.raises(ValueError, match="stateful"):
        generate(draft, text, prompt_lookup_num_tokens=DRAFTED)


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_assistant_is_fed_what_is_new(name: str, steps: Steps) -> None:
    """transformers feeds the whole text in each step where it takes a cache for one that has no length."""
    model, fed = target(name), []
    draft = noisy(name)
    text, plain = varied(model, LONG)
    for each in (model, draft):
        enable_assisted_generation(each)
    native = draft.forward

    @functools.wraps(native)
    def forward(**inputs: Any) -> Any:
        fed.append(inputs["input_ids"].numel())
        return native(**inputs)

    draft.forward = forward
    assert_same_tokens(model, text, generate(model, text, assistant_model=draft), plain)
    # The last two tokens of the text, then one drafted token after the other.
    assert sum(fed) <= LONG + sum(drafted + 1 for drafted, _ in steps)


def test_assistant_that_must_go_further_back_starts_over(
    steps: Steps, spoilt: list[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers asks for when two tokenizers disagree about the last tokens: 9 more in every fourth step."""
    kind = candidate_generator.AssistedCandidateGenerator
    native, lengths = kind._update_past_and_masks, []

    def update(self: Any, ids: Tensor, *_: Any, **__: Any) -> bool:
        has_cache = native(self, ids, 9 if len(spoilt) % 4 == 3 else 0)
        lengths.append(self.assistant_kwargs[CACHE].get_seq_length() if has_cache else 0)
        return has_cache

    monkeypatch.setattr(kind, "_update_past_and_masks", update)
    model = target("mamba2")
    text, plain = varied(model, LONG)
    enable_assisted_generation(model)
    assert_same_tokens(model, text, generate(model, text, assistant_model=model), plain)
    assert [accepted for drafted, accepted in steps if drafted] == left(spoilt)
    assert lengths.count(0) > 1
