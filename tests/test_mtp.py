"""The multi-token-prediction strategy: cached drafts are those of the head without a cache, whatever was accepted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.decoding.loop import decode
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.mtp import strategy as mtp
from hybridspec.drafts.mtp.strategy import MultiTokenPredictionDraft, MultiTokenPredictionDrafting
from hybridspec.drafts.registry import make_draft
from hybridspec.errors import (
    IncompatiblePairError,
    InputError,
    ModelLoadError,
    SessionError,
    UnsupportedLayerError,
)
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from tests import test_sampling_distribution
from tests.chi_square import FALSE_ALARM, p_value
from tests.drafting import generate
from tests.families import family_model, family_runner, is_known, some_tokens
from tests.mtp import (
    ANNOUNCED,
    drafted_logits,
    family_draft,
    family_head,
    qwen_head,
    random_head,
    target_hidden,
    unpacked,
    write_head,
)
from tests.test_sampling_distribution import SAMPLINGS, VOCABULARY, counted, exact
from tests.tiny import tiny_model

FAMILIES = [name for name in ANNOUNCED if is_known(name)]
SOFT = Sampling(1.0)


def open_draft(
    draft: MultiTokenPredictionDraft, prompt: list[int], sampling: Sampling = SOFT
) -> tuple[Session, MultiTokenPredictionDrafting]:
    opened = []
    generator = torch.Generator().manual_seed(1)
    session = draft.target.start(prompt, lambda s: opened.append(draft.start(prompt, sampling, generator, s)))
    return session, opened[0]


def step(
    draft: MultiTokenPredictionDraft,
    session: Session,
    drafting: MultiTokenPredictionDrafting,
    tokens: list[int],
    k: int,
    accepted: int,
    following: int,
) -> list[int]:
    """One round that accepts what it is told to; compares the drafts with the twin's. Gives the tokens from here on."""
    proposal = drafting.propose(k)
    assert len(proposal.tokens) == k
    expected = drafted_logits(draft.head, draft.target.model, tokens, proposal.tokens).softmax(-1)
    torch.testing.assert_close(proposal.probabilities, expected, atol=2e-4, rtol=1e-3)
    session.verify([tokens[-1], *proposal.tokens])
    accepted = min(accepted, k)
    session.commit(accepted + 1)
    drafting.accept(accepted, following)
    return [*tokens, *proposal.tokens[:accepted], following]


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "tape") for name in FAMILIES), ("qwen3_5_text", "recompute"), ("nemotron_h", "slots")]
)
def test_drafts_are_the_twins_after_any_history(name: str, mode: str) -> None:
    draft = family_draft(name, mode)
    tokens = some_tokens(40)
    history = [(1, 0), (3, 3), (3, 0), (4, 2), (2, 1), (1, 1)]
    session, drafting = open_draft(draft, tokens)
    with session, drafting:
        mark = None
        for index, (k, accepted) in enumerate(history):
            if index == 3:
                mark = session.snapshot(), drafting.snapshot(), list(tokens)
            tokens = step(draft, session, drafting, tokens, k, accepted, 3 + index)
        for turn in range(2):
            session.restore(mark[0])
            drafting.restore(mark[1])
            tokens = list(mark[2])
            for index in range(2):
                tokens = step(draft, session, drafting, tokens, 2, index + turn, 11 + index + turn)
    assert len(tokens) > 45


ROUNDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=8, deadline=None)
@given(length=st.integers(1, 40), rounds=ROUNDS)
def test_any_lengths_and_restores(length: int, rounds: list[tuple[int, int, bool]]) -> None:
    draft = family_draft("qwen3_5_text")
    tokens = some_tokens(length)
    session, drafting = open_draft(draft, tokens)
    with session, drafting:
        for index, (k, accepted, again) in enumerate(rounds):
            mark = session.snapshot(), drafting.snapshot()
            for turn in range(1 + again):
                if turn:
                    session.restore(mark[0])
                    drafting.restore(mark[1])
                if k == 0 or len(tokens) == 1:
                    # Nothing asked for, or nothing to draft from before the first pass.
                    assert not k or drafting.propose(k).tokens == []
                    session.verify(tokens[-1:])
                    session.commit(1)
                    drafting.accept(0, 5 + index)
                    grown = [*tokens, 5 + index]
                else:
                    grown = step(draft, session, drafting, tokens, k, accepted, 5 + index)
            tokens = grown


def test_the_head_is_the_published_formula() -> None:
    """Names, order of the norms and of the halves, positions: all against products of the published tensors."""
    model, tokens = family_model("qwen3_5_text"), some_tokens(23)
    hidden = target_hidden(model, tokens[:-1], streams=False)
    expected = qwen_head(family_head("qwen3_5_text"), model, tokens[1:], hidden)
    read, following = family_draft("qwen3_5_text").head(torch.tensor([tokens[1:]]), hidden.unsqueeze(0))
    torch.testing.assert_close(read[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(following[0], expected, atol=1e-4, rtol=1e-4)


def test_embeddings_and_language_model_head_are_the_targets() -> None:
    model, head = family_model("qwen3_5_text"), family_draft("qwen3_5_text").head
    own = dict(head.named_parameters())
    assert not any(own_one is p for own_one in own.values() for p in model.parameters())
    assert not any("embed" in name and "norm" not in name for name in own)
    assert torch.equal(head.logits(torch.ones(64)), model.lm_head(torch.ones(64)))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_output_is_the_targets(name: str) -> None:
    draft, prompt = family_draft(name), some_tokens(20)
    plain = generate(draft.target, prompt, 16)
    assert len(set(plain.tokens)) > 5
    run = generate(draft.target, prompt, 16, draft, k=3)
    assert run.tokens == plain.tokens
    assert sum(drafted for drafted, _ in run.steps) > 10


def test_a_prompt_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "CHUNK", 16)
    draft, tokens = family_draft("qwen3_5_text"), some_tokens(41)
    session, drafting = open_draft(draft, tokens)
    with session, drafting:
        step(draft, session, drafting, tokens, 3, 1, 7)


def test_an_early_stop_keeps_the_token_just_drafted() -> None:
    session, drafting = open_draft(family_draft("qwen3_5_text"), some_tokens(9))
    with session, drafting:
        answers = iter([True, False])
        proposal = drafting.propose(5, lambda distribution: next(answers))
        assert len(proposal.tokens) == 2 == len(proposal.probabilities)


def test_asking_twice_gives_the_same_draft() -> None:
    session, drafting = open_draft(family_draft("qwen3_5_text"), some_tokens(9), Sampling())
    with session, drafting:
        assert drafting.propose(4).tokens == drafting.propose(4).tokens


def test_sampled_output_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_sampling_distribution, "SAMPLES", 150)
    target, draft = sampling_pair()
    sampling, statistics = SAMPLINGS["temperature 1"], Statistics()
    counts = counted((target, draft), sampling, k=2, statistics=statistics)
    assert 0.05 < statistics.acceptance_rate < 0.95
    assert p_value(counts, exact(target, sampling)) > FALSE_ALARM


def sampling_pair() -> tuple[TargetRunner, MultiTokenPredictionDraft]:
    target = TargetRunner(
        tiny_model(layer_types=("linear_attention", "full_attention"), vocabulary=VOCABULARY, seed=21, spread=0.2)
    )
    return target, MultiTokenPredictionDraft(target, tensors=random_head(target.model))


def test_the_context_is_not_overrun(make_runner: Callable[..., TargetRunner]) -> None:
    target = make_runner("plain", context=24)
    draft = MultiTokenPredictionDraft(target, tensors=random_head(target.model))
    session, drafting = open_draft(draft, some_tokens(20))
    with session, drafting:
        assert len(drafting.propose(9).tokens) == 4
    prompt = some_tokens(12)
    assert generate(target, prompt, 12, draft, k=5).tokens == generate(target, prompt, 12).tokens


def test_an_interrupt_in_the_head_loses_nothing() -> None:
    draft, tokens = family_draft("qwen3_5_text"), some_tokens(30)
    session, drafting = open_draft(draft, tokens)
    with session, drafting:
        tokens = step(draft, session, drafting, tokens, 2, 1, 7)
        calls = 0

        def interrupt(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt

        hook = draft.head.decoder.layers[0].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            drafting.propose(4)
        hook.remove()
        step(draft, session, drafting, tokens, 4, 2, 9)


def test_closing_detaches_from_the_target() -> None:
    for name in ("qwen3_5_text", "qwen4_exp_text"):
        if not is_known(name):
            continue
        draft = family_draft(name)
        mixer = getattr(draft.target.model.get_decoder(), "hyper_connection_mixer", draft.target.model)
        session, drafting = open_draft(draft, some_tokens(5))
        with session:
            drafting.close()
            assert session.observers == []
            assert not mixer._forward_pre_hooks
            drafting.close()
            with pytest.raises(SessionError, match="closed"):
                drafting.propose(1)


def test_a_target_that_moved_alone_is_noticed() -> None:
    session, drafting = open_draft(family_draft("qwen3_5_text"), some_tokens(12))
    with session, drafting:
        mark = session.snapshot()
        session.verify([5])
        session.commit(1)
        drafting.accept(0, 6)
        drafting.propose(1)
        session.restore(mark)
        with pytest.raises(SessionError, match="restore both"):
            session.verify([5])
        assert session.length == 11
        drafting.accept(0, 7)
        with pytest.raises(SessionError, match="was fed 12 tokens and its draft told of 13"):
            drafting.propose(2)


# Reading the weights.


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_read_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    write_head(tmp_path / "c", family_head(name), prefix="model." if name == "bailing_hybrid" else "")
    target = TargetRunner(family_model(name), path=tmp_path / "c")
    draft = make_draft("mtp", target)
    expected = family_draft(name).head.state_dict()
    for key, tensor in draft.head.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    assert make_draft(f"mtp:path={tmp_path / 'c' / 'model.safetensors'}", target).name == "mtp"


@pytest.mark.parametrize(
    ("name", "experts", "others"), [("qwen3_5_moe_text", 3, 17), ("nemotron_h", 2, 14), ("qwen4_exp_text", 0, 31)]
)
def test_as_many_tensors_as_published(name: str, experts: int, others: int) -> None:
    """Qwen3.5-35B-A3B: 785 with 256 experts; Nemotron: 270 with 128; Qwen3.8-Flash-Next: 31 with packed ones."""
    if name not in FAMILIES:
        pytest.skip("this transformers has no such family")
    tensors = family_head(name) if not experts else unpacked(family_head(name))
    assert len(tensors) == experts * 4 + others


def target_with(tmp_path: Path, tensors: dict) -> TargetRunner:
    write_head(tmp_path / "c", tensors)
    return TargetRunner(family_model("qwen3_5_text"), path=tmp_path / "c")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = dict(family_head("qwen3_5_text"))
    del tensors["mtp.fc.weight"]
    with pytest.raises(ModelLoadError, match=r"/c: .*no tensor mtp\.fc\.weight"):
        make_draft("mtp", target_with(tmp_path, tensors))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = dict(family_head("qwen3_next"))
    del tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    write_head(tmp_path / "c", tensors)
    with pytest.raises(ModelLoadError, match=r"no tensor mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight"):
        make_draft("mtp", TargetRunner(family_model("qwen3_next"), path=tmp_path / "c"))


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    tensors = family_head("qwen3_5_text") | {"mtp.norm.weight": torch.ones(7)}
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: mtp\.norm\.weight has shape \[7\].* needs \[64\]"):
        make_draft("mtp", target_with(tmp_path, tensors))


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    tensors = family_head("qwen3_5_text") | {"mtp.fc.weight": torch.ones(64, 128, dtype=torch.int8)}
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: mtp\.fc\.weight is stored as torch\.int8"):
        make_draft("mtp", target_with(tmp_path, tensors))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    tensors = family_head("qwen3_5_text") | {"mtp.embed_tokens.weight": torch.ones(97, 64)}
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: mtp\.embed_tokens\.weight .* has no place"):
        make_draft("mtp", target_with(tmp_path, tensors))


def test_an_announced_head_without_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_with(tmp_path, {})
    monkeypatch.setattr(target.model.config, "mtp_num_hidden_layers", 1, raising=False)
    with pytest.raises(ModelLoadError, match=r"/c: config\.json announces a head \(mtp_num_hidden_layers = 1\)"):
        make_draft("mtp", target)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    target = target_with(tmp_path, family_head("qwen3_5_text"))
    path = tmp_path / "c" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a readable"):
        make_draft("mtp", target)


def test_a_model_object_needs_tensors() -> None:
    with pytest.raises(InputError, match="tensors="):
        MultiTokenPredictionDraft(family_runner("qwen3_5_text", "tape"))


def test_a_family_without_a_head() -> None:
    with pytest.raises(InputError, match=r"'jamba' has no multi-token-prediction head.*prompt-lookup"):
        MultiTokenPredictionDraft(family_runner("jamba", "tape"), tensors={})


def test_several_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_runner("qwen3_5_text", "tape")
    monkeypatch.setattr(target.model.config, "mtp_num_hidden_layers", 3, raising=False)
    with pytest.raises(UnsupportedLayerError, match="mtp_num_hidden_layers is 3"):
        MultiTokenPredictionDraft(target, tensors=family_head("qwen3_5_text"))


def test_a_recurrent_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_runner("nemotron_h", "tape")
    monkeypatch.setattr(target.model.config, "mtp_layers_block_type", ["linear_attention", "moe"])
    with pytest.raises(UnsupportedLayerError, match="linear_attention"):
        MultiTokenPredictionDraft(target, tensors=family_head("nemotron_h"))


def test_it_serves_its_own_target_only() -> None:
    draft = family_draft("qwen3_5_text")
    with pytest.raises(IncompatiblePairError, match="belongs to"):
        list(decode(family_runner("qwen3_next", "tape"), [3, 4], draft=draft, k=2, max_new_tokens=4))
    with pytest.raises(InputError, match="hidden states"):
        draft.start([3, 4], SOFT)
