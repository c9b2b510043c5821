"""Which drafted tokens stay: those of the argmax under greedy; by rejection sampling, so many that the output is exact.

The sampling rule is tested twice: step by step against the paper's algorithm with the same uniform draws, and by the
distribution of what it emits. The second test must be able to fail: rules with well-known mistakes are shown to it.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.decoding import acceptance
from hybridspec.decoding.acceptance import Verdict
from hybridspec.decoding.sampling import draw
from tests import reference
from tests.chi_square import FALSE_ALARM, p_value
from tests.examples import examples

VOCABULARY = 6
Rule = Callable[[Tensor, Tensor | None, list[int], torch.Generator], Verdict]


@examples(60)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 2**31))
def test_greedy_keeps_the_longest_matching_prefix(vocabulary: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(k + 1, vocabulary, generator=generator)
    drafted = torch.randint(vocabulary, (k,), generator=generator).tolist()
    choices = [max(range(vocabulary), key=lambda x, row=row: row[x].item()) for row in logits]
    verdict = acceptance.greedy(logits, drafted)
    assert drafted[: verdict.accepted] == choices[: verdict.accepted]
    assert verdict.accepted == k or drafted[verdict.accepted] != choices[verdict.accepted]
    assert verdict.token == choices[verdict.accepted]


def test_greedy_ignores_matches_behind_a_mismatch() -> None:
    logits = torch.eye(4)
    assert acceptance.greedy(logits, [0, 3, 2]) == Verdict(1, 1)
    assert acceptance.greedy(logits, [0, 1, 2]) == Verdict(3, 3)
    assert acceptance.greedy(logits[:1], []) == Verdict(0, 0)


def distributions(rows: int, generator: torch.Generator, zeros: bool) -> Tensor:
    """Random fp32 distributions, a third of their entries exactly 0 where wanted, as after top-k."""
    logits = 2 * torch.randn(rows, VOCABULARY, generator=generator)
    if zeros:
        hidden = torch.rand(rows, VOCABULARY, generator=generator) < 1 / 3
        hidden[:, 0] = False
        logits = logits.masked_fill(hidden, float("-inf"))
    return logits.softmax(-1)


RULES = {
    "token": (acceptance.rejection_sampling, reference.rejection_sampling),
    "block": (acceptance.block_verification, reference.block_verification),
}


@pytest.mark.parametrize("name", RULES)
@examples(150)
@given(k=st.integers(0, 6), zeros=st.booleans(), same=st.booleans(), seed=st.integers(0, 2**31))
def test_sampling_equals_the_paper_draw_for_draw(name: str, k: int, zeros: bool, same: bool, seed: int) -> None:
    """The same uniforms give the same number of kept tokens, and the follower is drawn from the same distribution."""
    generator = torch.Generator().manual_seed(seed)
    p, q = distributions(k + 1, generator, zeros), distributions(k, generator, zeros)
    if same:
        q = p[:k].clone()
    drafted = [draw(row, generator) for row in q]
    state = generator.get_state()
    uniforms = [torch.rand((), generator=generator).item() for _ in range(k)]
    generator.set_state(state)
    followers = []

    def spy(probabilities: Tensor, source: torch.Generator | None) -> int:
        followers.append(probabilities)
        return draw(probabilities, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "draw", spy)
        verdict = RULES[name][0](p, q if k else None, drafted, generator)
    accepted, follower = RULES[name][1](p.double().numpy(), q.double().numpy(), drafted, uniforms)
    assert verdict.accepted == accepted
    assert len(followers) == 1
    assert np.abs(followers[0].double().numpy() - follower).max() < 1e-6
    assert follower[verdict.token] > 0
    if same:
        assert verdict.accepted == k


def test_a_token_that_the_target_never_gives_is_never_kept() -> None:
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        assert acceptance.rejection_sampling(p, q, [0], generator) == Verdict(0, 1)


def test_a_zero_draw_does_not_keep_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(()))
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    assert acceptance.rejection_sampling(p, q, [0]) == Verdict(0, 1)


def test_a_rejection_without_residual_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """p below q everywhere, by rounding: there is nothing left to draw from, yet a token is needed."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(0.9999999))
    q = torch.tensor([[0.5, 0.5]])
    p = torch.cat([q * (1 - 1e-6), q])
    assert acceptance.rejection_sampling(p, q, [0]).accepted == 0


# The distribution of what comes out. Target and draft are Markov chains over six tokens, so that the exact probability
# of every continuation is a product of table entries, and a wrong second token shows as well as a wrong first one.

TABLES = torch.Generator().manual_seed(11)
P = distributions(VOCABULARY, TABLES, zeros=True)
Q = distributions(VOCABULARY, TABLES, zeros=True)
START = 2


def right(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    return acceptance.rejection_sampling(p, q, drafted, generator)


def resample_from_target(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    """Mistake: the correction is drawn from p instead of the residual."""
    accepted = right(p, q, drafted, generator).accepted
    return Verdict(accepted, draw(p[accepted], generator))


def keep_what_is_possible(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    """Mistake: every token stays that the target could have given."""
    for i, x in enumerate(drafted):
        if p[i, x] == 0:
            return Verdict(i, draw((p[i] - q[i]).clamp(min=0), generator))
    return Verdict(len(drafted), draw(p[len(drafted)], generator))


def keep_by_target_alone(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    """Mistake: a token stays with probability p, as if q was 1."""
    return right(p, None if q is None else torch.ones_like(q), drafted, generator)


def bonus_from_the_last_row_but_one(
    p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator
) -> Verdict:
    """Mistake: the row index is off by one behind a fully kept block."""
    verdict = right(p, q, drafted, generator)
    if verdict.accepted == len(drafted) > 0:
        return Verdict(verdict.accepted, draw(p[-2], generator))
    return verdict


def block(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    return acceptance.block_verification(p, q, drafted, generator)


def block_then_target(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    """Mistake: the correction is drawn from p instead of the residual."""
    accepted = block(p, q, drafted, generator).accepted
    return Verdict(accepted, draw(p[accepted], generator))


def block_by_its_last_weight(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator) -> Verdict:
    """Mistake: each prefix is judged by its weight alone, as if longer ones were not tried."""
    weight, kept = 1.0, 0
    for i, x in enumerate(drafted, 1):
        weight = min(1.0, weight * float(p[i - 1, x] / q[i - 1, x]))
        if torch.rand((), generator=generator) < weight:
            kept = i
    if kept == len(drafted):
        return Verdict(kept, draw(p[kept], generator))
    return Verdict(kept, draw((p[kept] - q[kept]).clamp(min=0), generator))


def continuations(rule: Rule, k: int, samples: int, stopping: bool = False) -> np.ndarray:
    """Counts ``[vocab, vocab]`` of the first two tokens that the rule emits after ``START``, up to K drafted per step.

    ``stopping``: a block ends at an odd token, which stays in it.
    """
    generator = torch.Generator().manual_seed(1234)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for _ in range(samples):
        emitted = [START]
        while len(emitted) < 3:
            drafted: list[int] = []
            while len(drafted) < k:
                drafted.append(draw(Q[(emitted + drafted)[-1]], generator))
                if stopping and drafted[-1] % 2:
                    break
            context = [emitted[-1], *drafted]
            accepted, token = rule(P[context], Q[context[:-1]] if k else None, drafted, generator)
            emitted += [*drafted[:accepted], token]
        counts[emitted[1], emitted[2]] += 1
    return counts


def exact_pairs() -> np.ndarray:
    table = P.double().numpy()
    return table[START][:, None] * table


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("rule", [right, block])
@pytest.mark.parametrize(("k", "samples"), [(1, 4000), (2, 4000), (4, 3000)])
def test_emitted_tokens_follow_the_target(k: int, samples: int, rule: Rule, stopping: bool) -> None:
    pairs = continuations(rule, k, samples, stopping)
    assert p_value(pairs.sum(1), exact_pairs().sum(1)) > FALSE_ALARM, "first token"
    assert p_value(pairs, exact_pairs()) > FALSE_ALARM, "first two tokens"


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        (resample_from_target, 2),
        (keep_what_is_possible, 2),
        (keep_by_target_alone, 2),
        (block_then_target, 3),
        (block_by_its_last_weight, 3),
        # The first two tokens hold the bonus token of a fully kept block only at K = 1.
        (bonus_from_the_last_row_but_one, 1),
    ],
)
def test_the_same_test_rejects_wrong_rules(rule: Rule, k: int) -> None:
    """Fewer samples, the same rate of false alarms."""
    assert p_value(continuations(rule, k, 2000), exact_pairs()) < FALSE_ALARM


def test_block_verification_keeps_more() -> None:
    """On average, over the same drafts; by theorem 2 of the paper it can never keep fewer."""
    generator = torch.Generator().manual_seed(5)
    kept = {rule: 0 for rule in (right, block)}
    for _ in range(3000):
        drafted: list[int] = []
        while len(drafted) < 4:
            drafted.append(draw(Q[[START, *drafted][-1]], generator))
        context = [START, *drafted]
        for rule in kept:
            kept[rule] += rule(P[context], Q[context[:-1]], drafted, generator).accepted
    assert kept[block] > 1.03 * kept[right]
