"""What the cost model and the decisions make of known numbers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Step
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.cost_model import (
    Costs,
    Surveying,
    places,
    play,
    predicted_speedup,
    wilson_interval,
)
from hybridspec.tuning.decision import corrected, decide
from hybridspec.tuning.timed_decoding import PreparedPrompt
from tests.examples import examples
from tests.families import some_tokens

COSTS = Costs(target_step=1.0, draft_step=0.1, verify=(0.9, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), rollback=0.05)


def test_cost_model_by_hand() -> None:
    assert predicted_speedup([0.8, 0.6], COSTS, 2) == pytest.approx(2.4 / (0.2 + 1.2 + 0.05))
    assert predicted_speedup([0.8, 0.6], COSTS, 0) == pytest.approx(1.0)


def test_places_of_steps() -> None:
    steps = [Step(3, 1, 0, 0, 0), Step(2, 2, 0, 0, 0), Step(0, 0, 0, 0, 0)]
    found = places(steps, [])
    assert [p.met for p in found] == [True, False, True, True, None, None]
    assert [p.asked for p in found] == [True, True, True, True, False, True]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_survey_tells_the_steps_of_every_shorter_length(make_runner, k: int) -> None:
    """The acceptance of each step, as the real loop takes them; only what follows a full block is a guess."""
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    with PreparedPrompt(target, draft, "p", some_tokens(9), Sampling(), 0) as prompt:
        rule = Surveying(6, rows=True)
        run = prompt.run(DecodeOptions(rule, 60))
        surveyed = places(run.steps, rule.rows)
        actual = [(s.drafted, s.accepted) for s in prompt.run(DecodeOptions(FixedLength(k), 60)).steps]
    assert len(surveyed) == 60
    assert 0.2 < sum(bool(p.met) for p in surveyed) / 60 < 0.95
    steps, _ = play([surveyed], COSTS, FixedLength(k))
    open_places = sum(p.met is None and not p.asked for p in surveyed)
    agree = sum(a == (s.drafted, s.accepted) for a, s in zip(actual, steps, strict=False))
    if open_places <= 1:
        assert agree >= len(actual) - 3
    assert abs(len(steps) - len(actual)) <= 1 + open_places
    assert all(row is None or row[0] >= row[-1] for p in surveyed for row in [p.row])


@examples(60)
@given(flags=st.lists(st.booleans(), min_size=1, max_size=40), k=st.integers(0, 6))
def test_played_steps_are_those_of_the_loop(flags: list[bool], k: int) -> None:
    """Against the loop written out for a draft that is right at the places that say so."""
    from hybridspec.tuning.cost_model import Place

    at, expected = 0, []
    while at < len(flags):
        drafted = min(k, len(flags) - at - 1)
        accepted = 0
        while accepted < drafted and flags[at + accepted]:
            accepted += 1
        expected.append((drafted, accepted))
        at += accepted + 1
    steps, speedup = play([[Place(flag) for flag in flags]], COSTS, FixedLength(k))
    assert [(s.drafted, s.accepted) for s in steps] == expected
    seconds = sum(d * 0.1 + COSTS.verify[d] + (0.05 if d else 0.1) for d, _ in expected)
    assert speedup == pytest.approx(len(flags) / seconds)


def test_a_rule_is_asked_with_what_the_draft_chose_from() -> None:
    import torch

    from hybridspec.tuning.cost_model import Place

    asked = []

    class Watching(DraftLength):
        name, longest, looks_at_drafts = "watching", 4, True

        def limit(self) -> int:
            return 4

        def proceed(self, probabilities: torch.Tensor) -> bool:
            asked.append(float(probabilities[0]))
            return float(probabilities[0]) > 0.5

    rows = [torch.tensor([p]) for p in (0.9, 0.4, 0.8, 0.7, 0.6, 0.5)]
    steps, _ = play([[Place(True, row) for row in rows]], COSTS, Watching())
    assert asked[:2] == pytest.approx([0.9, 0.4])
    assert steps[0].drafted == 2


def samples(speedup: float, noise: float = 0.0, prompts: int = 4) -> list[Sample]:
    rng = random.Random(int(speedup * 100))
    times = [10 / speedup * (1 + rng.uniform(-noise, noise)) for _ in range(prompts)]
    return [Sample(f"p{i}", 10.0, 10.0, 10, t, t, 10) for i, t in enumerate(times)]


FIXED, ADAPTIVE = Configuration("d", "3"), Configuration("d", "svip")


def test_a_clear_win_is_kept_and_a_tie_goes_to_the_simpler() -> None:
    assert decide({FIXED: samples(1.3), ADAPTIVE: samples(1.6)}).configuration == ADAPTIVE
    tie = decide({FIXED: samples(1.50, 0.2), ADAPTIVE: samples(1.51, 0.2)})
    assert tie.configuration == FIXED
    assert "a tie with" in tie.reason or tie.reason == "the fastest of those measured"


def test_plain_decoding_is_in_the_race() -> None:
    answer = decide({FIXED: samples(1.02, 0.3)})
    assert answer.configuration == PLAIN
    assert "noise" in answer.reason
    assert decide({FIXED: samples(0.8)}).reason.endswith("loses (0.80 to 0.80)")
    assert decide({}) is None


def test_one_prompt_never_wins() -> None:
    """A bootstrap over one prompt has no width."""
    assert decide({FIXED: samples(2.0, prompts=1)}).configuration == PLAIN


def test_predictions_are_corrected_by_the_same_draft() -> None:
    other = Configuration("e", "2")
    untried, scatter = corrected({FIXED: 2.0, ADAPTIVE: 3.0, other: 1.0}, {FIXED: 1.0, other: 1.0})
    assert untried == {ADAPTIVE: pytest.approx(1.5)}
    assert scatter == pytest.approx(1 / 3)


def test_wilson_interval_by_hand() -> None:
    low, high = wilson_interval(8, 10)
    assert 0.53 < low < 0.55
    assert 0.93 < high < 0.94
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("count", range(1, 60))
def test_wilson_interval_holds_the_share(count: int) -> None:
    for hits in (0, count // 2, count):
        low, high = wilson_interval(hits, count)
        assert 0.0 <= low <= hits / count <= high <= 1.0


def test_self_draft_survey(make_runner) -> None:
    target: TargetRunner = make_runner("plain")
    with PreparedPrompt(target, SameArchitectureDraft(target), "p", [3, 4, 5], Sampling(), 0) as prompt:
        rule = Surveying(4, rows=False)
        run = prompt.run(DecodeOptions(rule, 15))
    assert all(p.met is not False for p in places(run.steps, rule.rows))
    assert all(p.row is None for p in places(run.steps, rule.rows))
