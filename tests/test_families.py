"""Every model family that transformers has, tiny and random, as target and as draft: its tokens are taken back exactly,
or it is refused by name.

A case is a family and a rollback mode that serves it. Each case runs one test of all kinds of commits; the closer
looks take a family's default mode, and the other modes with ``-m slow``.
"""

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import HybridspecError
from hybridspec.runtime.runner import TargetRunner
from tests.comparison import (
    assert_all_close,
    assert_close,
    assert_same_output,
    assert_same_tensors,
    assert_varied,
    held_tensors,
    native_tensors,
)
from tests.drafting import Tampering, generate
from tests.families import (
    CLAMPED,
    FAMILIES,
    MODES,
    USUAL,
    WITHOUT_TAPE,
    exact_logits,
    family_model,
    family_runner,
    half_precision_model,
    model_type,
    modes,
    native_cache,
    native_pass,
    some_tokens,
    wrong,
)

#: Largest difference in units of the largest entry. Measured: 1.7e-5 for logits, 1.2e-5 for what is held, most 3e-6.
TOLERANCE = 5e-5
#: The same after many blocks; measured: 6.4e-5 for logits.
LONG_TOLERANCE = 2e-4
#: In bf16, root mean square in units of the expected values' own. What is held differs by rounding in blocks of another
#: length: 0 or under 0.005 in most families, at most 0.024.
HALF_TOLERANCE = 0.05
#: The logits' distance from full precision, in units of that of one pass in bf16, which is 0.005 to 0.06. Measured: at
#: most 2.1, where one position of a sparse attention flips; most 0.9 to 1.2.
HALF_LOSS = 2.5
#: Noise on the weights of a draft; with it about a third of the drafted tokens is right.
NOISE = {name: 0.06 for name in FAMILIES} | {"nemotron_h+clamped": 0.15}

every_case = pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in FAMILIES for mode in modes(name)])
in_depth = pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] if mode != modes(name)[0] else [])
        for name in FAMILIES
        for mode in modes(name)
    ],
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_comparison_would_notice(name: str) -> None:
    """It looks at all that transformers' own cache holds, and other tokens change it by far more than the tolerance."""
    runner, tokens = family_runner(name, modes(name)[0]), some_tokens(13)
    ours, others = (held_tensors(runner.start(x)) for x in (tokens, wrong(tokens)))
    output = native_pass(runner.model, tokens[:12])
    if type(native_cache(output)) is DynamicCache:
        assert ours.keys() == native_tensors(native_cache(output)).keys()
    assert len(ours) >= 4
    assert ours.keys() == others.keys()
    for key in ours:
        if "position" not in key and "offset" not in key:
            assert (ours[key] - others[key]).abs().max() > 1000 * TOLERANCE * ours[key].abs().max(), key


@every_case
def test_all_kinds_of_commits_in_a_row(name: str, mode: str) -> None:
    """Each leaves every tensor as in a session that was only ever given the kept tokens, and the next logits exact."""
    runner = family_runner(name, mode)
    steps = [
        (5, 0),  # rejected at once, on a prompt that is shorter than the convolution window
        (1, 1),  # a block of one token
        (1, 0),
        (4, 2),
        (5, 5),  # accepted as a whole, then rejected as a whole
        (5, 0),
        (12, 7),  # longer than the convolution window and the sliding window
        (3, 3),
    ]
    prompt = 2
    tokens = some_tokens(prompt - 1 + sum(kept for _, kept in steps))
    exact = exact_logits(name, tokens, prompt)
    session, undisturbed = (runner.start(tokens[:prompt]) for _ in range(2))
    position = prompt - 1
    for length, kept in steps:
        right = tokens[position : position + kept]
        logits = session.verify([*right, *wrong(some_tokens(length - kept, position))])[:kept]
        session.commit(kept)
        if kept:
            assert_close(logits, exact[position - prompt + 1 :][:kept], f"logits of {right} at {position}", TOLERANCE)
            undisturbed.verify(right)
            undisturbed.commit(kept)
        position += kept
        assert session.tokens == tokens[:position]
        assert_same_tensors(session, undisturbed, TOLERANCE)


@in_depth
def test_every_length_of_a_partial_commit(name: str, mode: str) -> None:
    """At the start of a sequence, and past the sliding window."""
    runner = family_runner(name, mode)
    for prompt in (1, 13):
        tokens = some_tokens(prompt + 5)
        start, block = tokens[:prompt], tokens[prompt - 1 :]
        stepwise = runner.start(start)
        for keep in range(len(block) + 1):
            if keep:
                stepwise.verify(block[keep - 1 : keep])
                stepwise.commit(1)
            with runner.start(start) as session:
                session.verify(block)
                session.commit(keep)
                assert session.tokens == [*start[:-1], *block[:keep]]
                assert_same_tensors(session, stepwise, TOLERANCE)


@in_depth
def test_verify_from_the_middle_equals_one_pass_without_cache(name: str, mode: str) -> None:
    """After nothing, a prompt within the convolution window, one past the sliding window, one in a long chunk."""
    runner = family_runner(name, mode)
    tokens = some_tokens(50)
    for prompt in (2 if name in CLAMPED else 1, 3, 13, 42):
        exact = exact_logits(name, tokens[: prompt + 8], prompt)
        with runner.start(tokens[:prompt]) as session:
            block = tokens[prompt - 1 : prompt + 5]
            logits = session.verify([*block, *wrong(block[:2])])[:6]
            assert_close(logits, exact[:6], f"logits after {prompt} tokens", TOLERANCE)
            session.commit(4)
            # On a block that is still pending as on a committed one.
            logits = torch.cat([session.verify(tokens[prompt + 3 : prompt + 5]), session.verify([tokens[prompt + 5]])])
            assert_close(logits, exact[4:7], f"logits of two blocks after {prompt + 3} tokens", TOLERANCE)


@in_depth
def test_prefill_in_chunks_equals_one_pass(name: str, mode: str) -> None:
    """Chunks below and above the length from which transformers' own chunked form runs, with and without a rest."""
    runner = family_runner(name, mode)
    prompt = 71
    tokens = some_tokens(prompt + 3)
    exact = exact_logits(name, tokens, prompt)
    whole: dict[str, Tensor] = {}
    for chunk in (prompt, 5, 35, 40):
        session = runner.start(tokens[:1])
        session.prefill(tokens[: prompt - 1], chunk=chunk)
        assert session.tokens == tokens[: prompt - 1]
        held = held_tensors(session)
        whole = whole or held
        assert_all_close(held, whole, TOLERANCE)
        assert_close(session.verify(tokens[prompt - 1 :]), exact, f"logits after chunks of {chunk}", TOLERANCE)


@in_depth
def test_greedy_speculation_gives_the_output_of_plain_decoding(name: str, mode: str) -> None:
    """The draft is a noisy copy: a hybrid with states of its own, right now and then."""
    target, draft = family_runner(name, mode), SameArchitectureDraft(family_runner(name, mode, NOISE[name]))
    prompt = some_tokens(13)
    plain = generate(target, prompt, 20)
    assert_varied(plain.tokens)
    tokens, steps = generate(target, prompt, 20, draft)
    assert_same_output(target.model, prompt, tokens, plain.tokens)
    accepted = {accepted for drafted, accepted in steps if drafted == 4}
    assert len(accepted) > 1, f"each step accepted {accepted} of 4: the draft is not of the kind that this test needs"


@in_depth
def test_a_model_that_drafts_for_itself_is_always_right(name: str, mode: str) -> None:
    """Also after a rejection, which here is forced in every other step: a stale draft state never shows in the output,
    only in what is accepted next.
    """
    runner = family_runner(name, mode)
    prompt = some_tokens(13)
    draft = SameArchitectureDraft(runner)
    right = generate(runner, prompt, 15, draft)
    assert_varied(right.tokens)
    assert right.steps == [(4, 4)] * 3
    spoilt = generate(runner, prompt, 19, Tampering(draft))
    assert_same_output(runner.model, prompt, spoilt.tokens[:15], right.tokens)
    assert spoilt.steps == [(4, 4), (4, 1), (4, 4), (4, 1), (4, 4)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if name in USUAL and mode == modes(name)[0] else [pytest.mark.slow])
        for name in FAMILIES
        for mode in modes(name)
    ],
)
def test_half_precision_weights(name: str, mode: str) -> None:
    """After rejections no further from full precision than one pass in half precision is; states in fp32."""
    model = half_precision_model(name)
    runner = TargetRunner(model, rollback=mode)
    tokens = some_tokens(28)
    session, undisturbed = runner.start(tokens[:13]), runner.start(tokens[:13])
    rows = []
    for position in range(12, 28, 4):
        block = tokens[position : position + 4]
        rows.append(session.verify([*block, *wrong(block)])[:4])
        session.commit(4)
        undisturbed.verify(block)
        undisturbed.commit(4)
    exact = exact_logits(name, tokens, 13, copy.deepcopy(model).float())
    once = exact_logits(name, tokens, 13, model)
    assert spread(torch.cat(rows), exact) <= HALF_LOSS * spread(once, exact)
    ours, theirs = held_tensors(session), held_tensors(undisturbed)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert spread(ours[key], theirs[key]) <= HALF_TOLERANCE, key
    # transformers keeps these in fp32 as well, MiniMax's apart.
    if mode != "recompute":
        assert {x.dtype for key, x in ours.items() if " state" in key} <= {torch.float32}


def spread(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of the expected values' own."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).square().mean() / expected.square().mean()).sqrt().item()


refused = pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in FAMILIES for mode in MODES if mode not in modes(name)]
)


@refused
def test_what_no_test_here_serves_is_refused_by_name(name: str, mode: str) -> None:
    model = family_model(name)
    with pytest.raises(HybridspecError) as refusal:
        TargetRunner(model, rollback=mode)
    assert model_type(name) in str(refusal.value) or "layer" in str(refusal.value)
    if "recompute" in modes(name):
        assert "recompute" in str(refusal.value)
        with pytest.warns(UserWarning, match="Falling back to rollback='recompute'"):
            assert TargetRunner(model).rollback == "recompute"


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - WITHOUT_TAPE))
def test_the_tape_is_the_default_where_there_is_one(name: str) -> None:
    assert TargetRunner(family_model(name)).rollback == "tape"


@pytest.mark.slow
@every_case
def test_many_blocks_of_any_length(name: str, mode: str) -> None:
    """A long session: errors that a single rollback hides would add up."""
    runner = family_runner(name, mode)
    generator = random.Random(11)
    tokens = some_tokens(150)
    exact = exact_logits(name, tokens, 13)
    session, undisturbed = (runner.start(tokens[:13]) for _ in range(2))
    position = 12
    while position < len(tokens):
        length = generator.choice([1, 1, 2, 3, 5, 8, 16])
        kept = min(generator.randint(0, length), len(tokens) - position)
        right = tokens[position : position + kept]
        logits = session.verify([*right, *some_tokens(length - kept, position)])[:kept]
        session.commit(kept)
        if kept:
            assert_close(logits, exact[position - 12 :][:kept], f"logits at {position}", LONG_TOLERANCE)
            undisturbed.verify(right)
            undisturbed.commit(kept)
        position += kept
        assert_same_tensors(session, undisturbed, LONG_TOLERANCE)
