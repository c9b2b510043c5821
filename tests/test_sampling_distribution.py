"""Through the real loop, models, rollback and all: sampled output has the target's own probabilities.

Every pair of first tokens is enumerated on the target without a cache and compared with the counts by chi-square. A
draft that is wrong more often than right makes corrections, bonuses and rollbacks all common.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridspec.decoding import acceptance
from hybridspec.decoding.acceptance import Verdict
from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.loop import decode
from hybridspec.decoding.sampling import Sampling, draw
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.registry import make_length
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import InputError
from hybridspec.runtime.runner import TargetRunner
from tests import reference
from tests.chi_square import FALSE_ALARM, p_value

MakeRunner = Callable[..., TargetRunner]
VOCABULARY = 9
PROMPT = [4]
#: Enough for p-values under 1e-15 on each of the wrong rules below; each sample is a whole generation.
SAMPLES = 300
SAMPLINGS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.7": Sampling(0.7),
    "top-k 4": Sampling(1.0, top_k=4),
    "top-p 0.8": Sampling(1.0, top_p=0.8),
    "all three": Sampling(1.5, top_k=5, top_p=0.9),
}
Pair = tuple[TargetRunner, SameArchitectureDraft]


@pytest.fixture(scope="module")
def pair(make_runner: MakeRunner) -> Pair:
    """A two-layer hybrid over nine tokens, and a smaller draft that it accepts a third of."""
    target = make_runner("draft", vocabulary=VOCABULARY, seed=21, spread=0.2)
    draft = make_runner("draft", layer_types=("full_attention",), vocabulary=VOCABULARY, seed=22, spread=0.2)
    return target, SameArchitectureDraft(draft)


def exact(target: TargetRunner, sampling: Sampling) -> np.ndarray:
    """Probabilities ``[vocab, vocab]`` of the first two tokens, from logits without a cache and a naive warper."""
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}

    def following(tokens: list[int]) -> np.ndarray:
        return reference.warped(reference.next_logits(target.model, tokens)[-1], **options)

    first = following(PROMPT)
    return np.stack([first[token] * following([*PROMPT, token]) for token in range(VOCABULARY)])


def counted(pair: Pair, sampling: Sampling, k: int | DraftLength, statistics: Statistics | None = None) -> np.ndarray:
    target, draft = pair
    generator = torch.Generator().manual_seed(99)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    options = {"k": k, "max_new_tokens": 3, "stop_tokens": frozenset(), "sampling": sampling, "generator": generator}
    for _ in range(SAMPLES):
        # Closed after two tokens: with K = 2 and room for a third, the second is a draft, a bonus or a correction.
        tokens = decode(target, PROMPT, draft=draft, statistics=statistics, **options)
        first, second = islice(tokens, 2)
        tokens.close()
        counts[first.id, second.id] += 1
    return counts


@pytest.mark.parametrize("name", ["temperature 1", pytest.param("top-p 0.8", marks=pytest.mark.slow), "all three"])
def test_generated_tokens_follow_the_target(pair: Pair, name: str) -> None:
    statistics = Statistics()
    probabilities = exact(pair[0], SAMPLINGS[name])
    counts = counted(pair, SAMPLINGS[name], k=2, statistics=statistics)
    assert 0.1 < statistics.acceptance_rate < 0.9, "one of the two ways was hardly ever taken"
    assert p_value(counts.sum(1), probabilities.sum(1)) > FALSE_ALARM, "first token"
    assert p_value(counts, probabilities) > FALSE_ALARM, "first two tokens"


@pytest.mark.parametrize("rule", ["svip:threshold=0.52", "expected-gain:longest=2"])
def test_a_rule_does_not_change_the_distribution(pair: Pair, rule: str) -> None:
    statistics = Statistics()
    sampling = SAMPLINGS["temperature 1"]
    counts = counted(pair, sampling, make_length(rule), statistics)
    assert 0.1 < statistics.acceptance_rate < 0.9, "one of the two ways was hardly ever taken"
    assert len({step.drafted for step in statistics.steps}) > 1, "all blocks were of one length"
    assert p_value(counts, exact(pair[0], sampling)) > FALSE_ALARM


def test_plain_sampling_follows_the_target(pair: Pair) -> None:
    sampling = SAMPLINGS["all three"]
    assert p_value(counted(pair, sampling, k=0), exact(pair[0], sampling)) > FALSE_ALARM


def always_keep(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator | None) -> Verdict:
    return Verdict(len(drafted), draw(p[len(drafted)], generator))


def correct_from_target(p: Tensor, q: Tensor | None, drafted: list[int], generator: torch.Generator | None) -> Verdict:
    right = RIGHT(p, q, drafted, generator)
    return Verdict(right.accepted, draw(p[right.accepted], generator))


RIGHT = acceptance.rejection_sampling


@pytest.mark.parametrize("rule", [always_keep, correct_from_target], ids=lambda rule: rule.__name__)
def test_a_wrong_rule_in_the_loop_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch, rule: Callable) -> None:
    monkeypatch.setattr(acceptance, "rejection_sampling", rule)
    sampling = SAMPLINGS["temperature 1"]
    assert p_value(counted(pair, sampling, k=2), exact(pair[0], sampling)) < FALSE_ALARM


def test_a_draft_that_hides_its_temperature_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distributions that a draft hands over must be those it drew from."""
    from hybridspec.decoding import sampling as module

    sampling = SAMPLINGS["temperature 1"]

    def sharper(probabilities: Tensor, generator: torch.Generator | None) -> int:
        return draw(probabilities**3 / (probabilities**3).sum(), generator)

    monkeypatch.setattr(module, "draw", sharper)
    assert p_value(counted(pair, sampling, k=2), exact(pair[0], sampling)) < FALSE_ALARM


@pytest.mark.parametrize("name", SAMPLINGS)
def test_probabilities_equal_the_naive_warper(name: str) -> None:
    sampling = SAMPLINGS[name]
    logits = 2 * torch.randn(40, 12, generator=torch.Generator().manual_seed(3))
    actual = sampling.probabilities(logits)
    assert actual.dtype == torch.float32
    for row, probabilities in zip(logits, actual, strict=True):
        expected = reference.warped(row, sampling.temperature, sampling.top_k, sampling.top_p)
        assert np.abs(probabilities.double().numpy() - expected).max() < 1e-6


def test_probabilities_leave_the_logits_alone() -> None:
    logits = torch.randn(3, 12)
    before = logits.clone()
    Sampling(0.5, top_k=3, top_p=0.5).probabilities(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_p": float("nan")},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    name = list(options)[-1].replace("_", "-")
    with pytest.raises(InputError, match=name):
        Sampling(**options)
