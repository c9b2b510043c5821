"""The loop gives the target's own tokens, exactly as many as were asked for, whatever draft, K and rollback mode."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice

import pytest
import torch
from transformers import PreTrainedModel

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.loop import Token, continue_decoding, decode
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner
from tests import reference

MakeRunner = Callable[..., TargetRunner]
PROMPTS = {"one token": [41], "short": [5, 17, 40], "long": [(11 * i * i + 3) % 96 for i in range(45)]}
NEVER: frozenset[int] = frozenset()
#: A stop token that no output holds.
NO_TOKEN = 95_000
every_mode = pytest.mark.parametrize("mode", ["tape", "recompute"])


def ids(tokens: Iterable[Token]) -> list[int]:
    return [token.id for token in tokens]


@cache
def _generated(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count, "min_new_tokens": count}
    return tuple(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())


def generated(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy loop."""
    tokens = list(_generated(model, tuple(prompt), count))
    assert len(set(tokens)) > count // 3, "a model that repeats itself proves nothing"
    return tokens


def assert_greedy(model: PreTrainedModel, prompt: list[int], actual: list[int], expected: list[int]) -> None:
    """Equal token for token; else says where, and by how much the model preferred its token there."""
    assert len(actual) == len(expected)
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if ours != theirs:
            logits = reference.next_logits(model, [*prompt, *expected[:i]])[-1]
            margin = (logits[theirs] - logits[ours]).item()
            raise AssertionError(f"position {i}: token {ours} instead of {theirs}, logit margin {margin:.2e}")


#: Model, mode, noise of the draft, prompts, values of K: every K once, every other axis with a few of them.
GREEDY_RUNS = [
    ("plain", "tape", 0.1, list(PROMPTS), range(9)),
    ("plain", "recompute", 0.1, ["short"], (0, 1, 3, 8)),
    ("plain", "recompute", 0.1, ["one token", "long"], (4,)),
    ("grouped", "tape", 0.05, list(PROMPTS), (0, 3, 6)),
    ("grouped", "recompute", 0.05, ["short"], (5,)),
    ("deep", "tape", 0.03, ["short"], (0, 4, 7)),
    ("deep", "recompute", 0.03, ["short"], (2,)),
]


@pytest.mark.parametrize(("name", "mode", "noise", "prompts", "ks"), GREEDY_RUNS)
def test_greedy_output_is_the_models_own(
    make_runner: MakeRunner, name: str, mode: str, noise: float, prompts: list[str], ks: Iterable[int]
) -> None:
    """Over a draft that is right about half of the time."""
    target = make_runner(name, mode)
    draft = SameArchitectureDraft(make_runner(name, mode, noise=noise))
    total = Statistics()
    for prompt in (PROMPTS[name] for name in prompts):
        expected = generated(target.model, prompt, 16)
        for k in ks:
            actual = decode(target, prompt, draft=draft, k=k, max_new_tokens=16, stop_tokens=NEVER, statistics=total)
            assert_greedy(target.model, prompt, ids(actual), expected)
    assert 0.05 < total.acceptance_rate < 0.95, "partial acceptance was hardly ever exercised"


@pytest.mark.parametrize("draft", ["draft", "dense", "plain"])
def test_drafts_of_other_shapes(make_runner: MakeRunner, draft: str) -> None:
    """A two-layer hybrid, a model without recurrent layers, half the depth: hardly ever right, never harmful."""
    target = make_runner("deep")
    expected = generated(target.model, PROMPTS["short"], 12)
    for mode in ("tape", "recompute"):
        strategy = SameArchitectureDraft(make_runner(draft, mode))
        actual = decode(target, PROMPTS["short"], draft=strategy, k=3, max_new_tokens=12, stop_tokens=NEVER)
        assert_greedy(target.model, PROMPTS["short"], ids(actual), expected)


@every_mode
@pytest.mark.parametrize("k", [1, 4])
def test_each_step_accepts_what_the_cacheless_loop_accepts(make_runner: MakeRunner, mode: str, k: int) -> None:
    """A stale draft state changes no output; it shows in what the draft proposes, step by step."""
    target, draft = make_runner("plain", mode), make_runner("plain", mode, noise=0.1)
    expected = reference.speculate_greedily(target.model, draft.model, PROMPTS["short"], k, 24)
    statistics = Statistics()
    options = {"k": k, "max_new_tokens": 24, "stop_tokens": NEVER, "statistics": statistics}
    actual = ids(decode(target, PROMPTS["short"], draft=SameArchitectureDraft(draft), **options))
    assert_greedy(target.model, PROMPTS["short"], actual, expected.tokens)
    assert [(step.drafted, step.accepted) for step in statistics.steps] == expected.steps
    assert len({accepted for _, accepted in expected.steps}) > 1, "every step went the same way"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
@pytest.mark.parametrize(
    ("name", "mode", "k", "prompts"),
    [
        ("plain", "tape", 1, ["short"]),
        ("plain", "tape", 4, list(PROMPTS)),
        ("grouped", "tape", 8, ["short", "long"]),
        ("plain", "recompute", 3, ["one token", "short"]),
    ],
)
def test_a_target_that_drafts_for_itself_is_always_right(
    make_runner: MakeRunner, temperature: float, name: str, mode: str, k: int, prompts: list[str]
) -> None:
    target = make_runner(name, mode)
    for prompt in prompts:
        statistics = Statistics()
        tokens = decode(
            target,
            PROMPTS[prompt],
            draft=SameArchitectureDraft(target),
            k=k,
            max_new_tokens=16,
            sampling=Sampling(temperature),
            generator=torch.Generator().manual_seed(k),
            stop_tokens=NEVER,
            statistics=statistics,
        )
        assert len(set(ids(tokens))) > 4
        assert statistics.accepted == statistics.drafted > 0


@every_mode
def test_a_draft_of_the_other_mode_is_always_right_too(make_runner: MakeRunner, mode: str) -> None:
    other = {"tape": "recompute", "recompute": "tape"}[mode]
    statistics = Statistics()
    draft = SameArchitectureDraft(make_runner("deep", other))
    options = {"k": 5, "max_new_tokens": 18, "stop_tokens": NEVER, "statistics": statistics}
    assert len(ids(decode(make_runner("deep", mode), PROMPTS["short"], draft=draft, **options))) == 18
    assert statistics.acceptance_rate == 1.0


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_as_many_tokens_as_asked_for(make_runner: MakeRunner, k: int, count: int) -> None:
    """The self-draft would always overshoot if it could."""
    target = make_runner("draft")
    statistics = Statistics()
    options = {"k": k, "max_new_tokens": count, "stop_tokens": NEVER, "statistics": statistics}
    tokens = list(decode(target, PROMPTS["short"], draft=SameArchitectureDraft(target), **options))
    assert len(tokens) == count
    # Every step gives its accepted tokens and one of the target's own.
    assert statistics.accepted + len(statistics.steps) == count
    assert sum(token.origin == "draft" for token in tokens) == statistics.accepted
    assert sum(token.origin == "target" for token in tokens) == len(statistics.steps)
    assert all(step.accepted <= step.drafted <= k for step in statistics.steps)


@pytest.mark.parametrize(("mode", "noise"), [("tape", 0.0), ("tape", 0.1), ("recompute", 0.1)])
def test_a_stop_token_inside_a_block_ends_there(make_runner: MakeRunner, mode: str, noise: float) -> None:
    """Every token of the output in turn is the stop token: first, in the middle and last of its block."""
    target = make_runner("plain", mode)
    draft = SameArchitectureDraft(make_runner("plain", mode, noise=noise))
    options = {"draft": draft, "k": 4, "max_new_tokens": 11}
    whole = list(decode(target, PROMPTS["short"], stop_tokens=NEVER, **options))
    inside = set()
    for stop in dict.fromkeys(ids(whole)):
        place = ids(whole).index(stop)
        inside.add(whole[place].origin == "draft")
        stopped = list(decode(target, PROMPTS["short"], stop_tokens=frozenset([stop, NO_TOKEN]), **options))
        assert stopped == whole[: place + 1]
    assert inside == {True, False}, "stop tokens at the end of a block and inside one"


def test_a_stop_token_ends_plain_decoding(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    whole = ids(decode(target, PROMPTS["short"], max_new_tokens=11, stop_tokens=NEVER))
    stopped = ids(decode(target, PROMPTS["short"], max_new_tokens=11, stop_tokens=frozenset([whole[5]])))
    assert stopped == whole[: whole.index(whole[5]) + 1]


def test_stop_tokens_come_from_the_model_unless_given(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_runner("plain")
    whole = ids(decode(target, PROMPTS["short"], max_new_tokens=12))
    assert len(whole) == 12
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [whole[4], 3])
    first = whole.index(whole[4])
    assert ids(decode(target, PROMPTS["short"], max_new_tokens=12)) == whole[: first + 1]
    assert ids(decode(target, PROMPTS["short"], max_new_tokens=12, stop_tokens=NEVER)) == whole


def test_the_same_seed_gives_the_same_sample(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.1))

    def sample(seed: int, k: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        options = {"k": k, "max_new_tokens": 16, "stop_tokens": NEVER, "sampling": Sampling(1.0, top_k=20)}
        return ids(decode(target, PROMPTS["short"], draft=draft, generator=generator, **options))

    for k in (0, 3):
        assert sample(1, k) == sample(1, k)
        assert sample(1, k) != sample(2, k)


def test_without_a_generator_the_global_seed_counts(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        options = {"k": 2, "max_new_tokens": 12, "stop_tokens": NEVER, "sampling": Sampling(1.0)}
        samples.append(ids(decode(target, PROMPTS["short"], draft=SameArchitectureDraft(target), **options)))
    assert samples[0] == samples[1]
    assert samples[1] != samples[2]


def test_top_k_of_one_is_greedy(make_runner: MakeRunner) -> None:
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.1))
    options = {"k": 3, "max_new_tokens": 16, "stop_tokens": NEVER, "sampling": Sampling(1.0, top_k=1)}
    expected = generated(target.model, PROMPTS["short"], 16)
    actual = ids(decode(target, PROMPTS["short"], draft=draft, **options))
    assert_greedy(target.model, PROMPTS["short"], actual, expected)


def test_statistics_by_position(make_runner: MakeRunner) -> None:
    """Filled while tokens are taken, and consistent with the steps at every moment."""
    target = make_runner("plain")
    draft = SameArchitectureDraft(make_runner("plain", noise=0.1))
    statistics = Statistics()
    assert statistics.acceptance_rate is None
    assert statistics.acceptance_length is None
    assert statistics.acceptance_by_position() == []
    options = {"k": 4, "max_new_tokens": 40, "stop_tokens": NEVER, "statistics": statistics}
    tokens = decode(target, PROMPTS["short"], draft=draft, **options)
    taken = list(islice(tokens, 7))
    assert statistics.accepted + len(statistics.steps) >= len(taken)
    list(tokens)
    steps = statistics.steps
    assert statistics.acceptance_rate == sum(s.accepted for s in steps) / sum(s.drafted for s in steps)
    assert statistics.acceptance_length == pytest.approx(40 / len(steps))
    by_position = statistics.acceptance_by_position()
    assert len(by_position) == 4
    assert by_position[0] == sum(s.accepted > 0 for s in steps) / sum(s.drafted > 0 for s in steps)
    assert all(s.draft_seconds >= 0 and s.verify_seconds > 0 and s.commit_seconds > 0 for s in steps)


def test_drafting_returns_to_a_mark(make_runner: MakeRunner) -> None:
    """A resident prompt: target and draft are restored together, and the draft's state is not stale afterwards."""
    target = make_runner("plain")
    generator = torch.Generator()
    expected = generated(target.model, PROMPTS["short"], 12)
    with target.start(PROMPTS["short"]) as session:
        drafting = SameArchitectureDraft(target).start(PROMPTS["short"], Sampling(), generator)
        marks = session.snapshot(), drafting.snapshot()
        for k in (3, 5, 3):
            session.restore(marks[0])
            drafting.restore(marks[1])
            statistics = Statistics()
            options = DecodeOptions(FixedLength(k), 12, generator=generator, stop_tokens=NEVER)
            tokens = continue_decoding(session, drafting, PROMPTS["short"][-1], options, statistics)
            assert_greedy(target.model, PROMPTS["short"], ids(tokens), expected)
            assert statistics.acceptance_rate == 1.0
        # A mark in the middle, where the draft lags behind the target by two tokens after a full acceptance.
        committed = list(session.tokens)
        middle = session.snapshot(), drafting.snapshot()
        for _ in range(2):
            session.restore(middle[0])
            drafting.restore(middle[1])
            proposal = drafting.propose(4)
            following = generated(target.model, [*PROMPTS["short"], *expected], 4)
            assert session.tokens == committed
            assert proposal.tokens == following
            drafting.accept(1, 7)
        drafting.close()
