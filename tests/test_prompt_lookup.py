"""Prompt lookup: the index finds what a search of every place finds, through accepted, rejected and restored tokens."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.decoding.loop import decode
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.prompt_lookup import PromptLookupDraft
from hybridspec.errors import InputError
from hybridspec.runtime.runner import TargetRunner
from tests.drafting import generate
from tests.examples import examples
from tests.reference import looked_up

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@examples(150)
@given(prompt=few_tokens, window=st.integers(0, 12), seed=st.integers(0, 2**31))
def test_it_finds_what_a_search_finds(prompt: list[int], window: int, seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    longest = rng.randint(shortest, 4)
    tokens = list(prompt)
    marks = []
    with PromptLookupDraft(longest, shortest, window).start(prompt, Sampling()) as drafting:
        for _ in range(12):
            if rng.random() < 0.2:
                marks.append((drafting.snapshot(), list(tokens)))
            elif marks and rng.random() < 0.2:
                mark, tokens = rng.choice(marks)
                tokens = list(tokens)
                drafting.restore(mark)
                marks = [m for m in marks if m[0] <= mark]
            k = rng.randint(1, 6)
            proposed = drafting.propose(k).tokens
            assert proposed == looked_up(tokens, k, longest, shortest, window)
            accepted, token = rng.randint(0, len(proposed)), rng.randint(0, 2)
            drafting.accept(accepted, token)
            tokens += [*proposed[:accepted], token]


def test_a_sampled_proposal_is_certain_of_its_tokens() -> None:
    with PromptLookupDraft(longest=2, shortest=1).start([5, 6, 7, 5], Sampling(1.0)) as drafting:
        proposal = drafting.propose(4)
    assert proposal.tokens == [6, 7, 5, 6]
    assert torch.equal(proposal.probabilities.argmax(-1), torch.tensor(proposal.tokens))
    assert torch.equal(proposal.probabilities.sum(-1), torch.ones(4))


def test_greedy_output_is_the_targets(make_runner: Callable[..., TargetRunner]) -> None:
    """A prompt that repeats itself makes proposals; a random model seldom follows them."""
    target = make_runner("plain")
    prompt = [7, 8, 9, 10] * 4
    expected = generate(target, prompt, 24)
    statistics = Statistics()
    options = {"k": 4, "max_new_tokens": 24, "stop_tokens": frozenset(), "statistics": statistics}
    tokens = [t.id for t in decode(target, prompt, draft=PromptLookupDraft(longest=2, shortest=1), **options)]
    assert tokens == expected.tokens
    assert statistics.drafted > 4


@pytest.mark.parametrize("options", [{"shortest": 0}, {"longest": 1, "shortest": 2}, {"window": -1}], ids=str)
def test_lengths_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        PromptLookupDraft(**options)
