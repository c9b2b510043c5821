"""Generations measured in turn, slice by slice, are those that each would be by itself."""

import random

import pytest

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.sampling import Sampling
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import SessionError
from hybridspec.tuning import timed_decoding as trial
from hybridspec.tuning.timed_decoding import SLICE, Contender, PreparedPrompt, in_turn, measure_pair, measure_round
from tests.families import some_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("new", [2, SLICE, 4 * SLICE + 1])
def test_in_turn_is_what_each_decodes_alone(make_runner, temperature: float, new: int) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    sampling = Sampling(temperature)
    prepare = lambda draft: PreparedPrompt(target, draft, "p", some_tokens(9), sampling, 3)  # noqa: E731
    with prepare(None) as plain, prepare(draft) as speculative, prepare(draft) as longer:
        ways = [
            Contender(plain, FixedLength(0)),
            Contender(speculative, FixedLength(3)),
            Contender(longer, FixedLength(5)),
        ]
        alone = [way.run(new) for way in ways]
        together = in_turn([way.begin(new) for way in ways], random.Random(0))
    for a, b in zip(alone, together, strict=True):
        assert a.tokens == b.tokens
        assert [(s.drafted, s.accepted) for s in a.steps] == [(s.drafted, s.accepted) for s in b.steps]
        assert len(b.tokens) == new
        spent = sum(s.draft_seconds + s.verify_seconds + s.commit_seconds for s in b.steps)
        assert spent <= b.wall_seconds


def test_a_clock_stands_still_while_the_others_decode(make_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_runner("plain")
    with PreparedPrompt(target, None, "p", some_tokens(9), Sampling(), 3) as prompt:
        decoding = Contender(prompt, FixedLength(0)).begin(4)
        ticks = iter(range(100))
        monkeypatch.setattr(trial.time, "perf_counter", lambda: next(ticks) * 1000.0)
        assert decoding.advance(2)
        inside = decoding.run.wall_seconds
        next(ticks)
        assert decoding.run.wall_seconds == inside
        assert decoding.advance(2)
        assert not decoding.advance(2)
    assert len(decoding.run.tokens) == 4


def test_a_round_takes_turns_where_contenders_share_a_prompt(make_runner) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    prepare = lambda draft: PreparedPrompt(target, draft, "p", some_tokens(9), Sampling(), 3)  # noqa: E731
    with prepare(None) as plain, prepare(draft) as one, prepare(draft) as two:
        contenders = [Contender(prompt, FixedLength(k)) for prompt, k in [(one, 1), (two, 2), (one, 3), (one, 4)]]
        pairs = measure_round(plain, contenders, 14, random.Random(1))
        for contender, pair in zip(contenders, pairs, strict=True):
            steps = [(s.drafted, s.accepted) for s in contender.run(14).steps]
            assert [(s.drafted, s.accepted) for s in pair.speculative.steps] == steps
            assert pair.plain.tokens == pair.speculative.tokens


def test_a_pair_that_differs_is_an_error(make_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    with (
        PreparedPrompt(target, None, "p", some_tokens(9), Sampling(), 3) as plain,
        PreparedPrompt(target, draft, "p", some_tokens(9), Sampling(), 3) as speculative,
    ):
        contender = Contender(speculative, FixedLength(2))
        pair = measure_pair(plain, contender, 12, random.Random(0))
        assert pair.plain.tokens == pair.speculative.tokens
        wrong = [pair.plain, trial.Run([0, *pair.plain.tokens[1:]], pair.plain.steps, 1.0, 1.0)]
        monkeypatch.setattr(trial, "in_turn", lambda *given: wrong)
        with pytest.raises(SessionError, match="leaves the plain one at token 0"):
            measure_pair(plain, contender, 12, random.Random(0))
