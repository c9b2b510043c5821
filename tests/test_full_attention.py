"""Drafting with the target's own full-attention layers: right by a slow twin, harmless to the target, exact in a loop.

The slow twin has no cache: it runs every kept layer over the whole sequence, on the target's own hidden states for what
is committed and on the reduced model's for what is drafted.
"""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.loop import decode
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.full_attention.block_pass import alone_pass, draft_pass, target_pass
from hybridspec.drafts.full_attention.bridges import Bridge
from hybridspec.drafts.full_attention.reduced import Cut
from hybridspec.drafts.full_attention.strategy import FullAttentionDraft
from hybridspec.errors import IncompatiblePairError, InputError, SessionError, UnsupportedLayerError
from hybridspec.runtime.model_facts import decoder_layers
from hybridspec.runtime.runner import TargetRunner
from hybridspec.state.cache import RollbackCache
from hybridspec.tuning.timed_decoding import PreparedPrompt
from tests.chi_square import FALSE_ALARM, p_value
from tests.comparison import assert_close, assert_varied, held_tensors
from tests.drafting import Tampering, generate
from tests.families import family_runner, some_tokens
from tests.test_sampling_distribution import SAMPLINGS, counted, exact
from tests.tiny import tiny_model

MakeRunner = Callable[..., TargetRunner]
FAMILIES = {
    "qwen3_5_text": [(0, 1, 2)],
    "qwen3_5": [(0, 1, 2)],
    "qwen3_5_moe_text": [(0, 1, 2)],
    "qwen3_next": [(0, 1, 2)],
    "olmo_hybrid": [(0, 1, 2)],
    "lara_mini": [(0, 1, 2), (4,)],
    "kimi_linear": [(0, 1, 2)],
    "bailing_hybrid": [(0, 1, 2)],
    "granitemoehybrid": [(0, 1, 2)],
    "bamba": [(0, 1), (3,)],
    "nemotron_h": [(0,), (4,)],
    "jamba": [(0, 1), (3,)],
    "minimax+linear_first": [(0, 1, 2)],
    "minimax+full_first": [(1,), (3,)],
    "lfm2": [(0, 1), (3,)],
    "lfm2_moe": [(0, 1), (3,)],
    "lfm3": [(0, 1), (3, 4)],
}
REFUSED = {
    "falcon_h1": "mixes attention and a recurrence",
    "zamba2": "mixes attention and a recurrence",
    "inkling_text": "mixes attention and a recurrence",
    "glm5_next": "selects keys by an indexer",
    "mamba2": "no full-attention layer",
    "recurrent_gemma": "no full-attention layer",
    "qwen3": "no recurrent layer",
}
PROMPT = [5, 17, 3, 60, 41, 8, 22, 35, 90, 11, 7, 64]
WINDOW = 3


def some_bridges(layout: Cut, window: int = WINDOW) -> nn.ModuleList:
    """Untrained, but far from doing nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        bridges = nn.ModuleList(Bridge(layout.width, window, 24) for _ in layout.runs)
        for bridge in bridges:
            nn.init.normal_(bridge.down.weight, std=0.3)
    return bridges.requires_grad_(False)


def bridged(target: TargetRunner) -> FullAttentionDraft:
    return FullAttentionDraft(target, some_bridges(FullAttentionDraft(target).reduced.cut), WINDOW)


@torch.no_grad()
def twin_logits(
    model: PreTrainedModel, layout: Cut, bridges: Sequence[nn.Module] | None, tokens: list[int], committed: int
) -> Tensor:
    """Logits ``[T - committed, vocab]`` after each of ``tokens[committed:]``, drafted behind ``committed`` tokens."""
    layers = decoder_layers(model, len(RollbackCache(model.config.get_text_config(decoder=True)).layers))
    calls: list[tuple[tuple, dict]] = []
    handles = [x.register_forward_pre_hook(lambda _, a, o: calls.append((a, o)), with_kwargs=True) for x in layers]
    ids = torch.tensor([tokens])
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    embedded = model.get_input_embeddings()(ids)[0]
    h = calls[0][0][0]
    for index, (layer, (inputs, options)) in enumerate(zip(layers, calls, strict=True)):
        run = next((n for n, run in enumerate(layout.runs) if index in run), None)
        if run is None:
            output = layer(torch.cat([inputs[0][:, :committed], h[:, committed:]], 1), *inputs[1:], **options)
            h = output[0] if isinstance(output, tuple) else output
        elif bridges is not None and index == layout.runs[run][0]:
            h = torch.stack([bridges[run](h[0, t], before(embedded, t)) for t in range(len(tokens))]).unsqueeze(0)
    handle = layers[-1].register_forward_hook(lambda _, __, x: (h, *x[1:]) if isinstance(x, tuple) else h)
    logits = model(input_ids=ids, use_cache=False).logits[0, committed:]
    handle.remove()
    return logits


def before(embedded: Tensor, position: int) -> Tensor:
    """Normed embeddings of the ``WINDOW - 1`` tokens before ``position``, zeros where there is none."""
    rows = []
    for t in range(position - WINDOW + 1, position):
        row = embedded[t] if t >= 0 else torch.zeros_like(embedded[0])
        rows.append(row / (row.square().mean() + 1e-6).sqrt())
    return torch.cat(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafted_distributions_equal_the_slow_twin(name: str) -> None:
    """From the start of a text, behind a long prefill, and after rejections."""
    target = family_runner(name, "tape")
    draft = bridged(target)
    layout = draft.reduced.cut
    assert list(layout.runs) == FAMILIES[name]
    for count, accepted in ((1, 2), (40, 0)):
        last = some_tokens(count)[-1]
        with PreparedPrompt(target, draft, name, some_tokens(count), Sampling(1.0), 0) as prepared:
            for _ in range(2):
                proposal = prepared.drafting.propose(3)
                tokens = [*prepared.session.tokens, last, *proposal.tokens[:-1]]
                logits = twin_logits(target.model, layout, some_bridges(layout), tokens, prepared.session.length)
                assert_close(proposal.probabilities, logits.softmax(-1), f"{count} tokens", 1e-4)
                prepared.session.verify([last, *proposal.tokens])
                prepared.session.commit(accepted + 1)
                last += 1
                prepared.drafting.accept(accepted, last)


def test_without_bridges_the_runs_are_skipped(make_runner: MakeRunner) -> None:
    target = make_runner("deep")
    draft = FullAttentionDraft(target)
    with PreparedPrompt(target, draft, "skipped", PROMPT, Sampling(1.0), 0) as prepared:
        proposal = prepared.drafting.propose(3)
    logits = twin_logits(target.model, draft.reduced.cut, None, [*PROMPT, *proposal.tokens[:-1]], len(PROMPT) - 1)
    assert_close(proposal.probabilities, logits.softmax(-1), "distributions", 1e-4)


def test_the_twin_would_notice_the_wrong_keys(make_runner: MakeRunner) -> None:
    """Had the context's keys come from the reduced model, the distributions would be far off."""
    target = make_runner()
    layout = bridged(target).reduced.cut
    bridges = some_bridges(layout)
    right = twin_logits(target.model, layout, bridges, PROMPT, len(PROMPT) - 2).softmax(-1)
    wrong = twin_logits(target.model, layout, bridges, PROMPT, 0)[-2:].softmax(-1)
    assert (right - wrong).abs().max() > 1e-2 * right.max()


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_cannot_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedLayerError, match=REFUSED[name]):
        FullAttentionDraft.create(family_runner(name, "tape"))


def test_recompute_is_refused_by_name(make_runner: MakeRunner) -> None:
    with pytest.raises(UnsupportedLayerError, match="rollback='recompute'.*tape or slots"):
        FullAttentionDraft.create(make_runner(rollback="recompute"))


def test_a_draft_serves_its_own_target_only(make_runner: MakeRunner) -> None:
    draft = FullAttentionDraft(make_runner())
    with pytest.raises(IncompatiblePairError, match="another target"):
        list(decode(make_runner(), PROMPT, draft=draft, k=2))
    with pytest.raises(InputError, match="target's session"):
        draft.start(PROMPT, Sampling())


@pytest.mark.parametrize(("rollback", "with_bridges"), [("tape", True), ("slots", False)])
def test_greedy_output_equals_plain(make_runner: MakeRunner, rollback: str, with_bridges: bool) -> None:
    target = make_runner(rollback=rollback)
    plain = generate(target, PROMPT, 24).tokens
    assert_varied(plain)
    draft = bridged(target) if with_bridges else FullAttentionDraft(target)
    for k in (1, 4):
        assert generate(target, PROMPT, 24, draft, k).tokens == plain


def faint_model(gain: float) -> PreTrainedModel:
    """A model whose recurrent layers add little to the hidden states, or nothing."""
    model = copy.deepcopy(tiny_model(layers=8, seed=2, spread=0.2))
    with torch.no_grad():
        for kind, layer in zip(model.config.layer_types, model.model.layers, strict=True):
            if kind == "linear_attention":
                layer.linear_attn.out_proj.weight.mul_(gain)
                layer.mlp.down_proj.weight.mul_(gain)
    return model


def test_where_recurrent_layers_add_nothing_every_token_is_accepted() -> None:
    """After whatever was accepted or rejected before: a wrong key or position would show as a miss."""
    target = TargetRunner(faint_model(0.0), rollback="tape")
    run = generate(target, PROMPT, 40, FullAttentionDraft(target), 4)
    assert_varied(run.tokens)
    assert all(drafted == accepted for drafted, accepted in run.steps)
    spoilt = generate(target, PROMPT, 40, Tampering(FullAttentionDraft(target)), 4)
    assert spoilt.tokens == run.tokens
    assert {accepted for drafted, accepted in spoilt.steps if drafted == 4} == {1, 4}


@pytest.fixture(scope="module")
def faint() -> TargetRunner:
    return TargetRunner(faint_model(0.02), rollback="tape")


def test_rejections_of_every_length_leave_the_output_alone(faint: TargetRunner) -> None:
    run = generate(faint, PROMPT, 60, FullAttentionDraft(faint), 3)
    assert {accepted for _, accepted in run.steps} == {0, 1, 2, 3}
    assert run.tokens == generate(faint, PROMPT, 60).tokens


def test_drafting_leaves_the_target_bitwise_as_it_was(faint: TargetRunner) -> None:
    draft = FullAttentionDraft(faint)
    block = [PROMPT[-1], 3, 9]
    for more, drafts in ((0, 1), (490, 20)):  # the second needs more room than the target's buffers have
        with faint.start(PROMPT) as session, faint.start(PROMPT) as other:
            for each in (session, other):
                each.prefill((PROMPT * 42)[:more])
            drafting = draft.start(PROMPT, Sampling(), None, session)
            before = {name: tensor.clone() for name, tensor in held_tensors(session).items()}
            buffers = [layer.buffer for layer in session.cache.attention]
            assert len(drafting.propose(drafts).tokens) == drafts
            after = held_tensors(session)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert (buffers[0].end < session.length + drafts) == (more > 0)
            assert all(layer.buffer is buffer for layer, buffer in zip(session.cache.attention, buffers, strict=True))
            assert torch.equal(session.verify(block), other.verify(block))
            with pytest.raises(SessionError, match="pending"):
                drafting.propose(1)


def test_drafting_from_an_older_snapshot_leaves_a_newer_one_alone(faint: TargetRunner) -> None:
    draft = FullAttentionDraft(faint)
    with faint.start(PROMPT) as session:
        older = session.snapshot()
        session.prefill(some_tokens(9))
        newer = session.snapshot()
        before = {name: tensor.clone() for name, tensor in held_tensors(session).items()}
        session.restore(older)
        draft.start(PROMPT, Sampling(), None, session).propose(4)
        session.restore(newer)
        after = held_tensors(session)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_trials_from_a_snapshot_repeat(faint: TargetRunner) -> None:
    sampling = Sampling(0.8)
    with PreparedPrompt(faint, FullAttentionDraft(faint), "p", PROMPT, sampling, 0) as prepared:
        first, plain, again = (prepared.run(DecodeOptions(FixedLength(k), 30)) for k in (3, 0, 3))
    assert first.tokens == again.tokens
    assert [s.accepted for s in first.steps] == [s.accepted for s in again.steps]
    assert len(plain.tokens) == 30


def test_drafts_stop_at_the_context_and_when_told() -> None:
    target = TargetRunner(tiny_model(context=16), rollback="tape")
    draft = FullAttentionDraft(target)
    with target.start(PROMPT) as session:
        drafting = draft.start(PROMPT, Sampling(), None, session)
        assert len(drafting.propose(9).tokens) == 16 - len(PROMPT) + 1
        assert len(drafting.propose(3, lambda row: row.shape != (96,)).tokens) == 1
    assert len(generate(target, PROMPT, 4, draft, 3).tokens) == 4


def test_sampled_output_follows_the_target(make_runner: MakeRunner) -> None:
    target = make_runner("draft", vocabulary=9, seed=21, spread=0.2)
    pair = target, FullAttentionDraft(target)
    statistics = Statistics()
    counts = counted(pair, SAMPLINGS["all three"], k=2, statistics=statistics)
    assert 0.1 < statistics.acceptance_rate < 0.9, "one of the two ways was hardly ever taken"
    assert p_value(counts, exact(target, SAMPLINGS["all three"])) > FALSE_ALARM


def test_one_pass_over_blocks_equals_drafting(make_runner: MakeRunner) -> None:
    """The pass that trains and measures bridges computes what drafts compute."""
    target = make_runner("deep")
    draft = bridged(target)
    reduced, bridges = draft.reduced, some_bridges(draft.reduced.cut)
    rows = torch.tensor([some_tokens(23, seed) for seed in (1, 2)]) % 96
    with torch.no_grad():
        truth = target_pass(reduced, rows)
        logits, cuts = draft_pass(reduced, rows, truth, block=4, first=3)
        assert len(cuts) == len(truth.cuts) == len(reduced.cut.runs)
        alone = alone_pass(reduced, rows)
    for row, tokens in enumerate(rows.tolist()):
        assert_close(truth.logits[row], target.model(rows[row : row + 1]).logits[0], "the target's own logits", 1e-4)
        for start, end in ((0, 3), (3, 7), (19, 23)):
            expected = twin_logits(target.model, reduced.cut, bridges, tokens[:end], start)
            assert_close(logits[row, start:end], expected, f"block at {start}", 1e-4)
        assert_close(alone[row], twin_logits(target.model, reduced.cut, bridges, tokens, 0), "alone", 1e-4)
