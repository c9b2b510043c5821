"""Generations measured in turn, slice by slice, are those that each would be by itself."""

import random

import pytest

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import SessionError
from hybridspec.tuning import timed_decoding
from hybridspec.tuning.timed_decoding import (
    SLICE,
    PreparedDecoding,
    PreparedPrompt,
    in_turn,
    measure_pair,
    measure_round,
)
from tests.families import some_tokens


def decoding(prompt: PreparedPrompt, k: int, new: int) -> PreparedDecoding:
    return PreparedDecoding(prompt, DecodeOptions(FixedLength(k), new))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("new", [2, SLICE, 4 * SLICE + 1])
def test_in_turn_is_what_each_decodes_alone(make_runner, temperature: float, new: int) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    sampling = Sampling(temperature)
    prepare = lambda draft: PreparedPrompt(target, draft, "p", some_tokens(9), sampling, 3)  # noqa: E731
    with prepare(None) as plain, prepare(draft) as speculative, prepare(draft) as longer:
        ways = [decoding(plain, 0, new), decoding(speculative, 3, new), decoding(longer, 5, new)]
        alone = [way.run() for way in ways]
        together = in_turn([way.begin() for way in ways], random.Random(0))
    for a, b in zip(alone, together, strict=True):
        assert a.tokens == b.tokens
        assert [(s.drafted, s.accepted) for s in a.steps] == [(s.drafted, s.accepted) for s in b.steps]
        assert len(b.tokens) == new
        spent = sum(s.draft_seconds + s.verify_seconds + s.commit_seconds for s in b.steps)
        assert spent <= b.wall_seconds


def test_a_clock_stands_still_while_the_others_decode(make_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_runner("plain")
    with PreparedPrompt(target, None, "p", some_tokens(9), Sampling(), 3) as prompt:
        running = decoding(prompt, 0, 4).begin()
        ticks = iter(range(100))
        monkeypatch.setattr(timed_decoding.time, "perf_counter", lambda: next(ticks) * 1000.0)
        assert running.advance(2)
        inside = running.result.wall_seconds
        next(ticks)
        assert running.result.wall_seconds == inside
        assert running.advance(2)
        assert not running.advance(2)
    assert len(running.result.tokens) == 4


def test_a_round_takes_turns_where_decodings_share_a_prompt(make_runner) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    prepare = lambda draft: PreparedPrompt(target, draft, "p", some_tokens(9), Sampling(), 3)  # noqa: E731
    with prepare(None) as plain, prepare(draft) as one, prepare(draft) as two:
        decodings = [decoding(prompt, k, 14) for prompt, k in [(one, 1), (two, 2), (one, 3), (one, 4)]]
        pairs = measure_round(plain, decodings, random.Random(1))
        for each, pair in zip(decodings, pairs, strict=True):
            steps = [(s.drafted, s.accepted) for s in each.run().steps]
            assert [(s.drafted, s.accepted) for s in pair.speculative.steps] == steps
            assert pair.plain.tokens == pair.speculative.tokens


def test_a_pair_that_differs_is_an_error(make_runner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.04))
    with (
        PreparedPrompt(target, None, "p", some_tokens(9), Sampling(), 3) as plain,
        PreparedPrompt(target, draft, "p", some_tokens(9), Sampling(), 3) as speculative,
    ):
        measured = decoding(speculative, 2, 12)
        pair = measure_pair(plain, measured, random.Random(0))
        assert pair.plain.tokens == pair.speculative.tokens
        wrong = [pair.plain, TimedGeneration([0, *pair.plain.tokens[1:]], pair.plain.steps, 1.0, 1.0)]
        monkeypatch.setattr(timed_decoding, "in_turn", lambda *given: wrong)
        with pytest.raises(SessionError, match="leaves the plain one at token 0"):
            measure_pair(plain, measured, random.Random(0))
