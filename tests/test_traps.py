"""What goes wrong when one runs hybrids through transformers, each with a test of its own: it fails once what
hybridspec does about it is taken out.
"""

import copy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from hybridspec.decoding.loop import decode
from hybridspec.decoding.sampling import Sampling
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.hooks import adapters
from hybridspec.runtime.runner import TargetRunner
from tests.comparison import assert_close, assert_same_output, assert_varied, held_tensors, native_tensors
from tests.drafting import Tampering, generate
from tests.families import (
    CLAMPED,
    FAMILIES,
    MULTIMODAL,
    TOKENS,
    VOCABULARY,
    build,
    decoded_logits,
    exact_logits,
    family_model,
    family_runner,
    modes,
    native_cache,
    native_pass,
    shake,
    some_tokens,
    wrong,
)
from tests.reference import next_logits

TOLERANCE = 5e-5
MAMBA_1 = ("mamba", "falcon_mamba", "jamba", "zamba")
MAMBA_2 = ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2")


def every_mode(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in names for mode in modes(name)])


def assert_exact_from_the_middle(runner: TargetRunner, name: str, blocks: list[int]) -> None:
    """Blocks of these lengths on a prompt of 13 tokens, all committed."""
    tokens = some_tokens(12 + sum(blocks))
    exact = exact_logits(name, tokens, 13)
    with runner.start(tokens[:13]) as session:
        for length in blocks:
            block = tokens[session.length : session.length + length]
            expected = exact[session.length - 12 :][:length]
            assert_close(session.verify(block), expected, f"logits of {length} tokens", TOLERANCE)
            session.commit(length)


@every_mode(*MAMBA_1, "recurrent_gemma", "minimax+linear_first")
def test_mixers_that_ignore_the_cached_state_when_several_tokens_are_fed(name: str, mode: str) -> None:
    """Mamba-1 starts its scan, and RecurrentGemma its convolution, from zeros; MiniMax gets a mask of the block alone
    if its first layer is a linear one. Nothing raises. The same in a long prefill on top of a state.
    """
    runner = family_runner(name, mode)
    assert_exact_from_the_middle(runner, name, [6, 2])
    tokens = some_tokens(60)
    session = runner.start(tokens[:5])
    session.prefill(tokens[4:58])
    assert_close(session.verify(tokens[58:]), next_logits(runner.model, tokens)[58:], "logits", TOLERANCE)


@every_mode(*sorted(CLAMPED))
def test_time_steps_are_clamped_in_the_many_token_path_only(name: str, mode: str) -> None:
    """Nemotron-H and Zamba2: a prefill must clamp as transformers' does; a verify pass, like decoding, must not."""
    runner = family_runner(name, mode)
    tokens = some_tokens(20)
    once = next_logits(runner.model, tokens)[12:]
    difference = (once - decoded_logits(runner.model, tokens, 13)).abs().max()
    assert difference > 100 * TOLERANCE * once.abs().max(), "the clamp does nothing here"
    assert_exact_from_the_middle(runner, name, [6, 1, 1])
    session = runner.start(tokens[:1])
    session.prefill(tokens[:12], chunk=5)
    native = native_tensors(native_cache(native_pass(runner.model, tokens[:12])))
    states = [key for key in native if key.endswith("state")]
    assert len(states) >= 2
    for key in states:
        assert_close(held_tensors(session)[key], native[key], f"{key} after a prefill", TOLERANCE)


@every_mode(*MAMBA_1, *MAMBA_2)
def test_the_one_token_path_overwrites_the_state_in_place(name: str, mode: str) -> None:
    """It does not tell the cache: what a snapshot holds, and what a rejected token should leave, is gone."""
    session = family_runner(name, mode).start(some_tokens(13))
    mark = session.snapshot()
    before = {key: tensor.clone() for key, tensor in held_tensors(session).items()}
    assert any(key.endswith("state") for key in before)

    def assert_unchanged() -> None:
        held = held_tensors(session)
        assert all(torch.equal(held[key], before[key]) for key in before)

    session.verify([5])
    session.commit(0)
    assert_unchanged()
    for token in (5, 6):
        session.verify([token])
        session.commit(1)
    session.restore(mark)
    assert_unchanged()


@every_mode("qwen3_next", "kimi_linear", "jamba", "bamba", "minimax+linear_first", "recurrent_gemma", "lfm2")
def test_a_stale_draft_state_shows_in_what_is_accepted_only(name: str, mode: str) -> None:
    """The output is right with any draft. A model that drafts for itself is always right, also after rejections."""
    runner = family_runner(name, mode)
    run = generate(runner, some_tokens(13), 19, Tampering(SameArchitectureDraft(runner)))
    assert run.steps == [(4, 4), (4, 1), (4, 4), (4, 1), (4, 4)]


def test_tied_embeddings_make_a_random_model_repeat_one_token() -> None:
    """Any comparison of its outputs is empty, and the tests say so."""
    model = build("lfm2", TOKENS | FAMILIES["lfm2"] | {"tie_word_embeddings": True}).eval()
    model.generation_config.eos_token_id = None
    tokens = generate(TargetRunner(model), some_tokens(13), 12).tokens
    with pytest.raises(AssertionError, match="distinct"):
        assert_varied(tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_model_of_these_tests_has_tied_embeddings(name: str) -> None:
    model = family_model(name)
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert first.shape == last.shape
    assert not torch.equal(first, last)


@every_mode("bamba", "minimax+linear_first")
def test_implicit_positions_restart_at_zero(name: str, mode: str) -> None:
    """Bamba counts each pass from 0; MiniMax takes the length from an empty first layer. Both have rotary attention."""
    runner = family_runner(name, mode)
    tokens = some_tokens(20)
    with torch.no_grad():
        cache = native_cache(native_pass(runner.model, tokens[:12]))
        implicit = native_pass(runner.model, tokens[12:13], None, cache).logits[0]
    exact = next_logits(runner.model, tokens[:13])[12:]
    assert (implicit - exact).abs().max() > 1000 * TOLERANCE, "positions do not matter here"
    assert_exact_from_the_middle(runner, name, [1, 1, 4])


@every_mode("mamba", "falcon_mamba", "mamba2")
def test_a_cache_without_attention_does_not_know_its_length(name: str, mode: str) -> None:
    session = family_runner(name, mode).start(some_tokens(13))
    with pytest.raises(ValueError, match="get_seq_length"):
        native_cache(native_pass(family_model(name), some_tokens(3))).get_seq_length()
    session.verify([5, 6, 7])
    assert (session.length, session.room) == (12, 2**31 - 15)
    session.commit(2)
    assert session.length == 14
    if mode != "recompute":
        assert session.cache.get_seq_length() == 14
    assert len(session.tokens) == 14


def narrow_model() -> torch.nn.Module:
    """Its logits lack the padding of the vocabulary."""
    family_model("inkling_text")
    model = build("inkling_text", TOKENS | FAMILIES["inkling_text"] | {"unpadded_vocab_size": 80}).eval()
    shake(model)
    assert next_logits(model, [5]).shape == (1, 80)
    return model


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampling"])
@pytest.mark.parametrize("turned", [False, True])
def test_logits_narrower_than_the_vocabulary(sampling: Sampling, turned: bool) -> None:
    """A target with them serves with a draft that has all, and the other way round; nothing outside is ever given."""
    narrow, full = TargetRunner(narrow_model()), family_runner("inkling_text", "tape")
    target, draft = (full, narrow) if turned else (narrow, full)
    options = {"max_new_tokens": 24, "stop_tokens": frozenset(), "sampling": sampling}
    generator = torch.Generator().manual_seed(3)
    draft = SameArchitectureDraft(draft)
    tokens = [token.id for token in decode(target, some_tokens(13), draft=draft, k=3, generator=generator, **options)]
    assert len(tokens) == 24
    if not turned:
        assert max(tokens) < 80
    if sampling.greedy:
        plain = [token.id for token in decode(target, some_tokens(13), **options)]
        assert_same_output(target.model, some_tokens(13), tokens, plain)


def test_logits_wider_than_the_tokenizer() -> None:
    """The vocabulary is the model's: a padded one has ids that the tokenizer does not know."""
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, "w0")))
    runner = TargetRunner(family_model("qwen3_5_text"), words)
    assert runner.vocab_size == VOCABULARY > len(words)
    tokens = generate(runner, some_tokens(13), 12, SameArchitectureDraft(runner)).tokens
    assert max(tokens) >= len(words)
    assert isinstance(runner.tokenizer.decode(tokens), str)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_config_of_the_text_model_is_nested(name: str) -> None:
    model = family_model(name)
    assert not hasattr(model.config, "layer_types")
    runner = family_runner(name, "tape")
    assert runner.vocab_size == VOCABULARY
    assert runner.max_length == model.config.text_config.max_position_embeddings
    assert_exact_from_the_middle(runner, name, [4, 1])


def test_a_multimodal_checkpoint_loads_as_its_text_part(tmp_path: Path) -> None:
    whole = family_model("qwen3_5")
    whole.save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0"))).save_pretrained(tmp_path)
    runner = TargetRunner.from_pretrained(tmp_path)
    tokens = some_tokens(20)
    with runner.start(tokens[:13]) as session:
        assert_close(session.verify(tokens[12:]), next_logits(whole, tokens)[12:], "logits", TOLERANCE)


def test_ties_are_told_by_their_margin() -> None:
    """Experts and sparse attention choose by score: at a tie one token may differ without any error in the state. So a
    comparison of outputs says how close the decision was.
    """
    model = copy.deepcopy(family_model("qwen3"))
    prompt = some_tokens(13)
    tokens = generate(TargetRunner(model), prompt, 6).tokens
    twin = next(token for token in range(3, VOCABULARY) if token not in tokens)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[tokens[4]]
    with pytest.raises(
        AssertionError, match=rf"token 4 is \[{twin}\] instead of \[{tokens[4]}\].* margin of 0\.0e\+00"
    ):
        assert_same_output(model, prompt, [*tokens[:4], twin, 5], tokens)
    with pytest.raises(AssertionError, match=r"token 5 .* margin of [1-9]"):
        assert_same_output(model, prompt, [*tokens[:5], twin], tokens)


#: Family -> its function, and the name and package of the kernel that transformers binds to it where it is installed.
KERNELS = {
    "qwen3_5_text": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla"),
    "mamba2": ("mamba2_chunk_scan", "mamba_chunk_scan_combined", "mamba_ssm"),
    "bamba": ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_installed_kernels_are_not_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """transformers binds a package's kernel when it is imported, whatever the device; on the CPU kernels fail."""
    function, kernel, package = KERNELS[name]
    modeling = sys.modules[type(family_model(name)).__module__]
    runner = family_runner(name, "tape")
    torch_form = getattr(modeling, function)
    while hasattr(torch_form, "__wrapped__"):
        torch_form = torch_form.__wrapped__

    def on_a_gpu_only(*_: object, **__: object) -> None:
        raise RuntimeError("a GPU kernel got CPU tensors")

    class Everywhere(ModuleType):
        """Any path into the package leads to the kernel."""

        def __getattr__(self, attribute: str) -> object:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return on_a_gpu_only if attribute == kernel else self

    monkeypatch.setitem(sys.modules, package, Everywhere(package))
    monkeypatch.setattr(modeling, function, use_kernel_func_from_hub_with_fallback(kernel, package)(torch_form))
    tokens = some_tokens(45)
    with pytest.raises(RuntimeError, match="CPU tensors"):
        next_logits(runner.model, tokens)
    adapters.attach(runner.model)
    session = runner.start(tokens[:41])
    logits = session.verify(tokens[40:])
    monkeypatch.undo()
    assert_close(logits, next_logits(runner.model, tokens)[40:], "logits", TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba", "bamba"])
def test_recording_leaves_the_fused_one_token_path_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A cache that records its past goes without the fused step; only ours does, and only while it runs."""
    runner = family_runner(name, "tape")
    modeling = sys.modules[type(runner.model).__module__]
    fused, calls = modeling.causal_conv1d_update, []

    def counted(*arguments: object, **options: object) -> Tensor:
        calls.append(arguments)
        return fused(*arguments, **options)

    monkeypatch.setattr(modeling, "causal_conv1d_update", counted)
    tokens = some_tokens(16)
    session = runner.start(tokens[:13])
    session.verify([tokens[12], *wrong(tokens[13:])])
    session.commit(1)
    calls.clear()
    decoded = decoded_logits(runner.model, tokens, 14)
    assert len(calls) == 9, "three tokens, three linear layers"
    assert_close(session.verify(tokens[13:]), decoded, "logits", TOLERANCE)
