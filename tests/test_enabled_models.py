"""A model enabled for assisted generation is otherwise as before, and what cannot be served is refused by name."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hybridspec import disable_assisted_generation, enable_assisted_generation
from hybridspec.decoding.assisted_generation import CACHE, AssistedCache
from hybridspec.errors import InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.session import SHORT_BLOCK
from hybridspec.state.cache import RollbackCache
from tests.assisted import DRAFTED, LONG, SHORT, assert_same_tokens, generate, noisy, target, varied
from tests.families import WITHOUT_TAPE, family_model, some_tokens


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
