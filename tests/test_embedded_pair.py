"""The shipped pair on the shipped prompts: the invariants on a real hybrid model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridspec import embedded
from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.loop import decode
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.timed_decoding import PreparedPrompt
from hybridspec.tuning.workloads.sources import load_workload

MODELS = {"target": embedded.TARGET, **embedded.DRAFTS}
WORKLOADS = embedded.workload_files()
#: Text, code and copying: the others are slow.
USUAL = ("chat_qa", "code", "json", "long_context")


@pytest.fixture(scope="module")
def target() -> TargetRunner:
    return TargetRunner.from_pretrained(embedded.TARGET)


@pytest.fixture(scope="module", params=list(embedded.DRAFTS))
def any_draft(request: pytest.FixtureRequest) -> SameArchitectureDraft:
    return SameArchitectureDraft(TargetRunner.from_pretrained(embedded.DRAFTS[request.param]))


@pytest.fixture(scope="module")
def draft() -> SameArchitectureDraft:
    return SameArchitectureDraft(TargetRunner.from_pretrained(embedded.DRAFTS[embedded.DEFAULT_DRAFT]))


def assert_greedy_equal(prepared: PreparedPrompt, ks: Iterator[int], new: int) -> None:
    """Token for token; a difference reports the position and the target's logit margin there."""
    plain = prepared.run(DecodeOptions(max_new_tokens=new)).tokens
    for k in ks:
        speculative = prepared.run(DecodeOptions(FixedLength(k), new)).tokens
        if speculative == plain:
            continue
        at = next(i for i in range(new) if plain[i] != speculative[i])
        prepared.rewind()
        logits = prepared.session.verify([prepared.tokens[-1], *plain[:at]])[-1]
        margin = float(logits[plain[at]] - logits[speculative[at]])
        pytest.fail(f"prompt {prepared.id}, K = {k}: differs at token {at}, logit margin {margin:.3g}")


@pytest.mark.parametrize("workload", [pytest.param(w, marks=[] if w in USUAL else pytest.mark.slow) for w in WORKLOADS])
def test_greedy_output_equals_plain_on_every_workload(
    target: TargetRunner, draft: SameArchitectureDraft, workload: str
) -> None:
    """Every sixth prompt takes one K of 1 to 8 in turn; the slow test takes all of both."""
    for i, prompt in enumerate(load_workload(WORKLOADS[workload]).prompts[::6]):
        with PreparedPrompt(target, draft, prompt.id, target.encode(prompt.text), Sampling(), 0) as prepared:
            assert_greedy_equal(prepared, iter([i % 8 + 1]), new=24)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_greedy_output_equals_plain_on_every_prompt_for_every_k(
    target: TargetRunner, any_draft: SameArchitectureDraft, workload: str
) -> None:
    for prompt in load_workload(WORKLOADS[workload]).prompts:
        with PreparedPrompt(target, any_draft, prompt.id, target.encode(prompt.text), Sampling(), 0) as prepared:
            assert_greedy_equal(prepared, iter(range(1, 9)), new=24)


def test_plain_decoding_equals_transformers_generate(target: TargetRunner) -> None:
    for path in WORKLOADS.values():
        tokens = target.encode(load_workload(path).prompts[0].text)
        ids = torch.tensor([tokens])
        output = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert output[0, len(tokens) :].tolist() == [t.id for t in decode(target, tokens, max_new_tokens=16)]


def test_target_as_its_own_draft_is_always_accepted(target: TargetRunner) -> None:
    tokens = target.encode(load_workload(WORKLOADS["prose"]).prompts[0].text)
    statistics = Statistics()
    list(decode(target, tokens, draft=SameArchitectureDraft(target), k=4, max_new_tokens=40, statistics=statistics))
    assert statistics.drafted > 20
    assert statistics.acceptance_rate == 1.0


@pytest.mark.slow
def test_greedy_output_does_not_loop_after_a_few_words(target: TargetRunner) -> None:
    """Of 40 new tokens, those that repeat what stood one period before; the period is at most 8 tokens."""
    shares = {}
    for name in WORKLOADS:
        for prompt in load_workload(WORKLOADS[name]).prompts[:2]:
            out = [t.id for t in decode(target, target.encode(prompt.text), max_new_tokens=40)]
            periods = [sum(a == b for a, b in zip(out[8 + p :], out[8:-p], strict=True)) for p in range(1, 9)]
            shares[prompt.id] = max(periods) / 32
    looping = [name for name, share in shares.items() if share > 0.75]
    assert len(looping) < 0.25 * len(shares), looping


def test_recompute_and_tape_agree(target: TargetRunner, draft: SameArchitectureDraft) -> None:
    tokens = target.encode(load_workload(WORKLOADS["code"]).prompts[0].text)[:200]
    recompute = TargetRunner(target.model, target.tokenizer, rollback="recompute")
    outputs = [
        [t.id for t in decode(runner, tokens, draft=draft, k=3, max_new_tokens=24)] for runner in (target, recompute)
    ]
    assert outputs[0] == outputs[1]


def test_drafts_are_trained(target: TargetRunner, any_draft: SameArchitectureDraft) -> None:
    """Far above what an untrained draft of this vocabulary gets (about 0)."""
    statistics = Statistics()
    for name in ("json", "logs"):
        for prompt in load_workload(WORKLOADS[name]).prompts[:3]:
            tokens = target.encode(prompt.text)
            list(decode(target, tokens, draft=any_draft, k=2, max_new_tokens=32, statistics=statistics))
    assert statistics.acceptance_rate > 0.4


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_ordinary_and_complete(name: str) -> None:
    folder = MODELS[name]
    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
    assert model.config.linear_key_head_dim == 64
    text = "def f(x):\n    return x + 1\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert all(torch.isfinite(weights.get_tensor(k)).all() for k in weights.keys())  # noqa: SIM118
    card = (folder / "README.md").read_text()
    assert all(word in card for word in ("license", "tokens seen", "training time", "PSF-2.0"))


def test_tokenizers_are_one_and_the_same() -> None:
    files = [(folder / "tokenizer.json").read_bytes() for folder in MODELS.values()]
    assert len(set(files)) == 1


def test_weights_stay_small() -> None:
    total = sum(path.stat().st_size for folder in MODELS.values() for path in Path(folder).glob("*.safetensors"))
    assert total < 40e6


def test_chat_template_matches_the_training_format() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.TARGET, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|endoftext|><|user|>\nHi\n<|assistant|>\n"
