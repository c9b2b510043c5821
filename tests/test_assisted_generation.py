"""transformers' own ``generate`` on enabled models: assisted output is plain output, no state goes stale, and a model
that is disabled again is as before.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from hybridspec import disable_assisted_generation, enable_assisted_generation
from hybridspec.decoding.assisted_generation import CACHE, AssistedCache
from hybridspec.errors import InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.session import SHORT_BLOCK
from hybridspec.state.cache import RollbackCache
from tests.families import CLAMPED, WITHOUT_TAPE, family_model, noisy_model, some_tokens, wrong
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
COUNT = 32
LONG, SHORT = 45, 6
DRAFTED = 4
Steps = list[tuple[int, int]]


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that drafts a fixed number of tokens, and for which no token is padding."""
    model = copy.deepcopy(model)
    model.generation_config.pad_token_id = None
    model.generation_config.num_assistant_tokens = DRAFTED
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def target(name: str) -> PreTrainedModel:
    return prepared(family_model(name))


def noisy(name: str) -> PreTrainedModel:
    return prepared(noisy_model(name, 0.1))


class Echo(LogitsProcessor):
    """Favours what followed the last token before, unless it is just over: a random model then repeats itself at times,
    and not in circles.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        followed = [b for a, b in zip(text, text[1:], strict=False) if a == text[-1] and b not in text[-12:]]
        if followed:
            scores = scores.clone()
            scores[:, followed[-1]] += 2.0 * scores.std()
        return scores


def generate(model: PreTrainedModel, text: Tensor, count: int = COUNT, **options: Any) -> list[int]:
    """The new tokens, greedily."""
    output = model.generate(text, max_new_tokens=count, do_sample=False, **options)
    return output[0, text.shape[1] :].tolist()


def assert_same_tokens(model: PreTrainedModel, text: Tensor, actual: list[int], expected: list[int]) -> None:
    """With the margin by which the model prefers the right token, which tells a wrong state from a tie."""
    if actual == expected:
        return
    i = next((i for i, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), None)
    assert i is not None, f"{len(actual)} tokens instead of {len(expected)}"
    logits = next_logits(model, [*text[0].tolist(), *expected[:i]])[-1]
    margin = (logits[expected[i]] - logits[actual[i]]).item()
    pytest.fail(
        f"new token {i} is {actual[i]} instead of {expected[i]}: their logits are {margin:.2e} apart, of a spread of "
        f"{logits.std():.2e}"
    )


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


def varied(model: PreTrainedModel, length: int, count: int = COUNT, **options: Any) -> tuple[Tensor, list[int]]:
    """A prompt and its plain continuation; of a text that soon repeats one token, an equal output would show little."""
    for seed in range(20):
        text = torch.tensor([some_tokens(length, seed)])
        plain = generate(model, text, count, **options)
        if len(set(plain)) >= min(12, count // 2):
            return text, plain
    raise AssertionError("no prompt gives many distinct tokens")


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


def test_disabled_model_is_as_before() -> None:
    model, text = target("qwen3_5_text"), torch.tensor([some_tokens(SHORT)])
    before, plain = dict(vars(model)), generate(model, text)
    for _ in range(2):
        enable_assisted_generation(model)
        generate(model, text, prompt_lookup_num_tokens=DRAFTED)
        disable_assisted_generation(model)
        disable_assisted_generation(model)
        assert vars(model) == before
        assert generate(model, text) == plain
        with pytest.raises(ValueError, match="stateful"):
            generate(model, text, prompt_lookup_num_tokens=DRAFTED)


def test_other_uses_of_an_enabled_model_and_other_models_are_transformers_own() -> None:
    model, other = target("bamba"), target("bamba")
    text = torch.tensor([some_tokens(SHORT), some_tokens(SHORT, 8)])
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    plain, beams = model.generate(text, **options), model.generate(text, num_beams=2, **options)
    kind = type(model)
    with enable_assisted_generation(model):
        assert type(model) is kind
        output = model.generate(text, **options)
        assert type(getattr(output, CACHE)) is DynamicCache
        assert torch.equal(output.sequences, plain.sequences)
        assert torch.equal(model.generate(text, num_beams=2, **options).sequences, beams.sequences)
        assert torch.equal(model(text).logits, other(text).logits)
        with pytest.raises(ValueError, match="stateful"):
            generate(other, text[:1], prompt_lookup_num_tokens=DRAFTED)


def test_context_manager_disables_on_every_way_out() -> None:
    model = target("lfm2")
    before = dict(vars(model))
    with enable_assisted_generation(model):
        # What is enabled already stays so.
        with enable_assisted_generation(model):
            pass
        assert vars(model) != before
    assert vars(model) == before
    with pytest.raises(RuntimeError, match="any"), enable_assisted_generation(model):
        raise RuntimeError("any")
    assert vars(model) == before


def test_training_mode_survives() -> None:
    model = target("mamba").train()
    model.backbone.norm_f.eval()
    before = [module.training for module in model.modules()]
    enable_assisted_generation(model)
    assert [module.training for module in model.modules()] == before


def test_sampling() -> None:
    model = target("qwen3_5_text")
    text = torch.tensor([some_tokens(LONG)])
    enable_assisted_generation(model)
    runs = []
    for options in ({"assistant_model": noisy("qwen3_5_text")}, {"prompt_lookup_num_tokens": DRAFTED}):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            output = model.generate(text, max_new_tokens=16, do_sample=True, temperature=0.7, **options)
            assert output.shape == (1, LONG + 16)
            runs.append(output.tolist())
        assert runs[-3] == runs[-2] != runs[-1]


def test_stop_token_inside_a_block() -> None:
    model = target("nemotron_h")
    text, plain = varied(model, SHORT)
    enable_assisted_generation(model)
    for end in (5, 6, 7):
        stop = plain[end]
        tokens = generate(model, text, assistant_model=model, eos_token_id=stop)
        assert tokens == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_long_prompts_leave_no_long_tape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 tokens most are kept at once, by target and assistant, also when the prompt comes in chunks."""
    blocks = []
    native = RollbackCache.end_block
    counted = lambda self, n, *more: (blocks.append(n), native(self, n, *more))[1]  # noqa: E731
    monkeypatch.setattr(RollbackCache, "end_block", counted)
    model = target(name)
    text, plain = varied(model, 200, 8)
    enable_assisted_generation(model)
    for options in ({}, {"prefill_chunk_size": 90}):
        assert_same_tokens(model, text, generate(model, text, 8, assistant_model=noisy(name), **options), plain)
    assert max(blocks) == SHORT_BLOCK


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba"])
def test_hidden_states_and_a_padded_prompt(name: str) -> None:
    """What must come out of one pass comes out of one pass."""
    model, draft = target(name), noisy(name)
    text, plain = varied(model, LONG, 8)
    enable_assisted_generation(model)
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": draft}
    output = model.generate(text, output_hidden_states=True, return_dict_in_generate=True, **options)
    assert_same_tokens(model, text, output.sequences[0, LONG:].tolist(), plain)
    exact = model(text, output_hidden_states=True).hidden_states
    for ours, theirs in zip(output.hidden_states[0], exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), text], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(text)], 1)
    output = model.generate(padded, attention_mask=mask, **options)
    assert_same_tokens(model, text, output[0, LONG + 3 :].tolist(), plain)


def test_deep_copy_of_an_enabled_model_runs_its_own_weights() -> None:
    model = target("qwen3_5_text")
    enable_assisted_generation(model)
    text, plain = torch.tensor([some_tokens(SHORT)]), generate(model, torch.tensor([some_tokens(SHORT)]))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    changed = generate(other, text)
    assert changed != plain
    assert generate(other, text, prompt_lookup_num_tokens=DRAFTED) == changed
    disable_assisted_generation(other)
    assert generate(model, text, prompt_lookup_num_tokens=DRAFTED) == plain


def test_forward_pass_that_was_wrapped_before_is_used_and_comes_back() -> None:
    """As the hooks of accelerate wrap it to move weights between devices."""
    model, calls = target("qwen3_5_text"), []
    native = model.forward

    @functools.wraps(native)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return native(*arguments, **options)

    model.forward = wrapped
    with enable_assisted_generation(model):
        calls.clear()
        generate(model, torch.tensor([some_tokens(SHORT)]), prompt_lookup_num_tokens=DRAFTED)
        assert calls
    assert model.forward is wrapped


@pytest.mark.parametrize("name", sorted(WITHOUT_TAPE))
def test_models_without_a_tape_are_refused_by_name(name: str) -> None:
    model = target(name)
    before = dict(vars(model))
    with pytest.raises(UnsupportedLayerError, match=type(model).__name__):
        enable_assisted_generation(model)
    assert vars(model) == before
    dense = target("qwen3")
    enable_assisted_generation(dense)
    with pytest.raises(UnsupportedLayerError, match=type(model).__name__):
        generate(dense, torch.tensor([some_tokens(SHORT)]), assistant_model=model)


def test_caches_that_cannot_roll_back_are_refused() -> None:
    model, text = target("qwen3_5_text"), torch.tensor([some_tokens(SHORT)])
    enable_assisted_generation(model)
    for options in ({"cache_implementation": "static"}, {CACHE: DynamicCache(config=model.config)}):
        with pytest.raises(InputError, match="disable_assisted_generation"):
            generate(model, text, prompt_lookup_num_tokens=DRAFTED, **options)
    with pytest.raises(InputError, match="assistant_model"):
        generate(model, text, assistant_early_exit=2)
    with pytest.raises(ValueError, match="batch_size"):
        generate(model, text.repeat(2, 1), prompt_lookup_num_tokens=DRAFTED)


def test_target_cannot_go_back_behind_the_last_crop() -> None:
    model = target("mamba")
    enable_assisted_generation(model)
    cache = AssistedCache(model.config)
    model(torch.tensor([some_tokens(5)]), logits_to_keep=1, **{CACHE: cache})
    assert cache.get_seq_length() == 5
    for wanted in (-6, 1):
        with pytest.raises(SessionError, match="5 were fed"):
            cache.crop(wanted)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    with pytest.raises(SessionError, match="0 were fed"):
        cache.crop(-1)


def test_padding_is_refused_where_prompts_are_clamped() -> None:
    model = family_model("nemotron_h+clamped")
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6]])
    with enable_assisted_generation(model), pytest.raises(InputError, match="padding"):
        model.generate(ids, attention_mask=(ids != 0).long(), prompt_lookup_num_tokens=2, max_new_tokens=4)
