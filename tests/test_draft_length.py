"""Draft-length rules: each formula against its slow twin, what they ask for over a life, and the loop under them."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.loop import continue_decoding, decode
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics, Step
from hybridspec.drafts.length.bandit import Bandit
from hybridspec.drafts.length.entropy import SVIP, AdaEDL
from hybridspec.drafts.length.estimates import AcceptanceEstimate, StepCosts
from hybridspec.drafts.length.expected_gain import ExpectedGain
from hybridspec.drafts.registry import make_length
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.specs import LENGTHS
from tests import reference

MakeRunner = Callable[..., TargetRunner]
PROMPT = [5, 17, 40, 8, 61, 2, 33, 90, 14, 27]
NEVER: frozenset[int] = frozenset()
#: Every rule, as on a command line. The thresholds lie amid the entropies of a tiny random model, all near 4.52 nats.
RULES = [
    "fixed:3",
    "svip:threshold=0.8234,longest=6",
    "adaedl:threshold=0.0493,epsilon=0.001",
    "expected-gain",
    "bandit",
]


def distributions() -> st.SearchStrategy[list[float]]:
    weights = st.lists(st.floats(0, 1), min_size=2, max_size=12).filter(lambda values: sum(values) > 1e-3)
    return weights.map(lambda values: [value / sum(values) for value in values])


def steps(longest: int = 6, fewest: int = 1) -> st.SearchStrategy[list[Step]]:
    seconds = st.floats(1e-3, 1.0)
    one = st.integers(0, longest).flatmap(
        lambda drafted: st.builds(Step, st.just(drafted), st.integers(0, drafted), seconds, seconds, seconds)
    )
    return st.lists(one, min_size=fewest, max_size=60)


def plain(all_steps: list[Step]) -> list[reference.Drafted]:
    return [reference.Drafted(*vars(step).values()) for step in all_steps]


@given(q=distributions(), threshold=st.floats(0, 1))
def test_svip_stops_where_the_scaled_entropy_passes_the_threshold(q: list[float], threshold: float) -> None:
    bound = (0.15 * reference.entropy(q)) ** 0.5
    if abs(bound - threshold) > 1e-5:
        assert SVIP(threshold).proceed(torch.tensor(q, dtype=torch.float64)) == (bound < threshold)


@given(q=distributions(), threshold=st.floats(0, 1), gamma=st.floats(0, 1))
def test_adaedl_stops_where_the_bound_falls_below_lambda(q: list[float], threshold: float, gamma: float) -> None:
    bound = 1 - (gamma * reference.entropy(q)) ** 0.5
    if abs(bound - threshold) > 1e-5:
        rule = AdaEDL(gamma, threshold)
        assert rule.proceed(torch.tensor(q, dtype=torch.float64)) == (bound > threshold)


def test_adaedl_moves_lambda_as_draft_and_verify_does() -> None:
    rule = AdaEDL(threshold=0.5, target_acceptance=0.6, beta_1=0.5, beta_2=0.9, epsilon=0.01)
    for drafted, accepted, acceptance, threshold in (
        (4, 0, 0.3, 0.501),
        (0, 0, 0.3, 0.501),
        (2, 2, 0.65, 0.5),
        (4, 3, 0.7, 0.499),
        (5, 1, 0.45, 0.5),
    ):
        rule.observe(Step(drafted, accepted, 1.0, 1.0, 1.0))
        assert (rule.acceptance, rule.threshold) == pytest.approx((acceptance, threshold), abs=1e-12)


def test_adaedl_keeps_lambda_between_zero_and_one() -> None:
    for accepted, end in ((0, 1.0), (4, 0.0)):
        rule = AdaEDL(beta_2=0.0, epsilon=0.3)
        for _ in range(20):
            rule.observe(Step(4, accepted, 1.0, 1.0, 1.0))
            assert 0 <= rule.threshold <= 1
        assert rule.threshold == end


@given(steps(), st.floats(0, 1), st.floats(1, 50))
def test_acceptance_is_the_faded_share_of_steps_that_got_that_far(
    seen: list[Step], prior: float, memory: float
) -> None:
    estimate = AcceptanceEstimate(6, memory, prior, weight=2.5)
    for step in seen:
        estimate.observe(step.drafted, step.accepted)
    expected = reference.acceptance_by_position(plain(seen), 6, 1 - 1 / memory, prior, 2.5)
    assert estimate.by_position() == pytest.approx(expected)


def test_acceptance_is_not_misled_by_lengths_that_vary() -> None:
    """Easy texts were drafted long and hard ones short: steps that drafted two tokens kept both in 9 of 10, but of all
    steps only half would get that far.
    """
    estimate = AcceptanceEstimate(2, 1e9, prior=0.5, weight=1e-9)
    for _ in range(9):
        estimate.observe(2, 2)
    estimate.observe(2, 1)
    for _ in range(10):
        estimate.observe(1, 0)
    assert estimate.conditional() == pytest.approx([0.5, 0.9])
    assert estimate.by_position() == pytest.approx([0.5, 0.45])


@given(steps().filter(lambda seen: seen[0].drafted > 0), st.integers(2, 40))
def test_costs_are_medians_by_length_drawn_to_a_line(seen: list[Step], window: int) -> None:
    costs = StepCosts(6, window)
    for step in seen:
        costs.observe(step)
    by_position = [0.8, 0.7, 0.5, 0.4, 0.1, 0.0]
    expected = reference.seconds_of_steps(plain(seen), 6, window, by_position)
    assert costs.table(by_position) == pytest.approx(expected)


def test_catching_up_after_plain_steps_is_no_cost_of_a_token() -> None:
    costs = StepCosts(4, 100)
    for drafted, seconds in ((2, 0.2), (4, 0.4), (0, 0.0), (0, 0.0), (2, 9.0), (2, 0.2)):
        costs.observe(Step(drafted, 0, seconds, 1.0, 0.0))
    assert costs.table([1.0] * 4) == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])


def test_nothing_is_known_before_something_was_drafted() -> None:
    costs = StepCosts(4, 100)
    costs.observe(Step(0, 0, 0.0, 1.0, 0.0))
    assert costs.table([1.0] * 4) is None


@given(steps(fewest=9), st.sampled_from(["measured", "given"]))
def test_expected_gain_takes_the_best_rate_of_the_formula(seen: list[Step], how: str) -> None:
    """Without hysteresis, on any history that begins with drafted tokens."""
    seen = [Step(2, 1, 0.1, 0.5, 0.1), *seen]
    known = [1.0, 1.5, 1.7, 1.8, 2.0, 2.5, 2.6]
    rule = ExpectedGain(6, memory=10, hysteresis=0.0, step_costs=known if how == "given" else None)
    faded = False
    for step in seen:
        rule.observe(step)
        faded = faded or rule._probing
    if faded:
        return  # Probes let acceptance fade: another test's matter.
    by_position = reference.acceptance_by_position(plain(seen), 6, 0.9, 0.7, 3.0)
    measured = reference.seconds_of_steps(plain(seen), 6, 40, by_position)
    seconds = known if how == "given" else measured
    rates = [tokens / time for tokens, time in zip(accumulate(by_position, initial=1.0), seconds, strict=True)]
    assert rule.rates() == pytest.approx(rates)
    assert rates[rule.k] == pytest.approx(max(rates))


@given(steps(fewest=20), st.floats(0, 1), st.floats(0.5, 1))
def test_the_bandit_takes_the_greatest_confidence_bound(seen: list[Step], exploration: float, discount: float) -> None:
    rule = Bandit((0, 2, 5), exploration, discount)
    pulled = []
    for step in seen:
        pulled.append((rule.limit(), reference.Drafted(*vars(step).values())))
        rule.observe(step)
    assert [arm for arm, _ in pulled[:3]] == [5, 2, 0]
    scores = reference.confidence_bounds(pulled, [0, 2, 5], exploration, discount)
    assert scores[rule.lengths.index(rule.limit())] == pytest.approx(max(scores))


class Simulation:
    """A workload by its conditional acceptance and step costs, without noise in either: acceptance in equal measure."""

    def __init__(self, draft: float = 0.1, verify: float = 0.05) -> None:
        self.draft, self.verify = draft, verify
        self.owed: dict[int, float] = {}

    def run(self, rule: DraftLength, acceptance: float, count: int) -> list[int]:
        """The lengths asked for in ``count`` steps."""
        asked = []
        for _ in range(count):
            drafted = rule.limit()
            accepted = 0
            while accepted < drafted:
                # Each position accepts its share of the steps that reach it, evenly spread.
                self.owed[accepted] = self.owed.get(accepted, 0.0) + acceptance
                if self.owed[accepted] < 1:
                    break
                self.owed[accepted] -= 1
                accepted += 1
            rule.observe(Step(drafted, accepted, self.draft * drafted, 1 + self.verify * drafted, 0.0))
            asked.append(drafted)
        return asked

    def best(self, acceptance: float, longest: int = 8) -> int:
        tokens = list(accumulate((acceptance**k for k in range(1, longest + 1)), initial=1.0))
        rates = [t / (1 + (self.draft + self.verify) * k) for k, t in enumerate(tokens)]
        return rates.index(max(rates))


def test_expected_gain_finds_the_best_length_and_follows_a_change() -> None:
    simulation, rule = Simulation(), ExpectedGain()
    for acceptance in (0.9, 0.5, 0.9):
        asked = simulation.run(rule, acceptance, 150)
        assert abs(rule.k - simulation.best(acceptance)) <= 1
        assert asked[-20:].count(rule.k) >= 19


def test_expected_gain_stops_drafting_and_comes_back() -> None:
    simulation, rule = Simulation(draft=0.5), ExpectedGain()
    simulation.run(rule, 0.9, 50)
    assert rule.k > 0
    asked = simulation.run(rule, 0.05, 400)
    assert rule.k == 0
    assert 0 < sum(k > 0 for k in asked[100:]) <= 10, "probes, but few"
    asked = simulation.run(rule, 0.95, 250)
    assert rule.k >= simulation.best(0.95) - 1 > 0
    assert 0 not in asked[-20:]


def test_probes_grow_rarer_while_they_fail_and_follow_each_other_while_they_hit() -> None:
    rule = ExpectedGain(probe_interval=4, step_costs=[1.0, 3.0, 5.0])

    def plain_steps() -> int:
        count = 0
        while rule.limit() == 0:
            rule.observe(Step(0, 0, 0.0, 1.0, 0.0))
            count += 1
        return count

    assert rule.k == 0
    waits = []
    for _ in range(4):
        waits.append(plain_steps())
        rule.observe(Step(rule.limit(), 0, 1.0, 1.0, 0.0))
    assert waits == [4, 8, 16, 16]
    plain_steps()
    rule.observe(Step(1, 1, 1.0, 1.0, 0.0))
    assert rule.k == 0 and rule.limit() > 0


def test_hysteresis_keeps_a_length_that_is_nearly_as_good() -> None:
    """Costs under which K = 1 turns out to be 3 % better than K = 2."""
    for hysteresis, expected in ((0.0, 1), (0.2, 2)):
        rule = ExpectedGain(memory=1000, prior=1.0, hysteresis=hysteresis, step_costs=[1.0, 1.2, 1.4])
        assert rule.k == 2
        for i in range(60):
            rule.observe(Step(2, (1, 2, 0, 1, 1)[i % 5], 1.0, 1.0, 0.0))
        assert rule.rates()[1] == pytest.approx(1.035 * rule.rates()[2], rel=0.01)
        assert rule.k == expected


def test_plain_steps_are_measured_again_only_where_it_is_close() -> None:
    for draft, plain_again in ((0.0, False), (0.6, True)):
        simulation, rule = Simulation(draft=draft, verify=0.0), ExpectedGain(longest=2, probe_interval=8)
        simulation.run(rule, 0.8, 30)
        asked = simulation.run(rule, 0.8, 60)
        assert rule.k > 0
        assert (0 in asked) == plain_again


def test_a_rule_lives_with_a_draft_that_never_says_anything() -> None:
    for name in RULES:
        rule = make_length(name)
        for _ in range(200):
            assert 0 <= rule.limit() <= rule.longest
            rule.observe(Step(0, 0, 1e-5, 1.0, 0.0))


def test_the_bandit_settles_and_follows_a_change() -> None:
    simulation, rule = Simulation(), Bandit()
    for acceptance in (0.9, 0.3):
        asked = simulation.run(rule, acceptance, 600)[-100:]
        nearest = min(rule.lengths, key=lambda k: abs(k - simulation.best(acceptance)))
        close = [k for k in rule.lengths if abs(rule.lengths.index(k) - rule.lengths.index(nearest)) <= 1]
        assert sum(k in close for k in asked) > 70


REFUSED = {
    "svip:threshold=-1": "threshold",
    "svip:threshold=high": "threshold",
    "svip:longest=0": "longest",
    "svip:longest=2.5": "longest",
    "adaedl:target-acceptance=1.5": "target_acceptance",
    "adaedl:beta_2=-0.1": "beta_2",
    "expected-gain:memory=0": "memory",
    "expected-gain:prior=nan": "prior",
    "expected-gain:probe_interval=0": "probe_interval",
    "expected-gain:step_costs=1": "step_costs",
    "expected-gain:step_costs=1/0": "step_costs",
    "expected-gain:step_costs=1/x": "step_costs",
    "bandit:lengths=0/-1": "lengths",
    "bandit:lengths=1.5": "lengths",
    "bandit:discount=2": "discount",
    "bandit:exploration=-1": "exploration",
    "svip:treshold=0.2": "threshold, longest",
    "expected-gian": "Did you mean 'expected-gain'",
    "swip": "Did you mean 'svip'",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_bad_values_are_refused_by_name(spec: str) -> None:
    with pytest.raises(InputError, match=REFUSED[spec]):
        make_length(spec)


def test_rules_are_made_from_text() -> None:
    rule = make_length("svip:threshold=0.2,longest=16")
    assert isinstance(rule, SVIP) and (rule.threshold, rule.longest) == (0.2, 16)
    assert make_length("expected-gain:step_costs=1/1.4/1.6").longest == 2
    assert make_length("bandit:0/3/5").lengths == [0, 3, 5]
    assert make_length("bandit:lengths=4").lengths == [4]
    assert isinstance(make_length("3"), FixedLength)
    assert {name.partition(":")[0] for name in RULES} == set(LENGTHS.known)


@pytest.fixture(scope="module")
def noisy(make_runner: MakeRunner) -> tuple[TargetRunner, SameArchitectureDraft]:
    """A target and a copy of it that is often, not always, right."""
    return make_runner("plain"), SameArchitectureDraft(make_runner("plain", noise=0.1))


@pytest.fixture(scope="module")
def expected(noisy: tuple[TargetRunner, SameArchitectureDraft]) -> dict[int, list[int]]:
    """Plain greedy output by the last token of the prompt."""
    options = {"max_new_tokens": 40, "stop_tokens": NEVER}
    return {last: [t.id for t in decode(noisy[0], [*PROMPT, last], **options)] for last in range(3)}


@pytest.mark.parametrize("name", RULES)
def test_greedy_output_is_the_targets_own(
    make_runner: MakeRunner,
    noisy: tuple[TargetRunner, SameArchitectureDraft],
    expected: dict[int, list[int]],
    name: str,
) -> None:
    """One rule over several sequences, the last with a stranger for a draft, which is mostly wrong."""
    target, draft = noisy
    rule, statistics = make_length(name), Statistics()
    for last, tokens in expected.items():
        drafting = draft if last < 2 else SameArchitectureDraft(make_runner("draft"))
        options = {"k": rule, "max_new_tokens": 40, "stop_tokens": NEVER, "statistics": statistics}
        assert [t.id for t in decode(target, [*PROMPT, last], draft=drafting, **options)] == tokens
    assert 0 < statistics.accepted < statistics.drafted
    assert max(step.drafted for step in statistics.steps) <= rule.longest
    if name != "fixed:3":
        assert len({step.drafted for step in statistics.steps}) > 2


@pytest.mark.parametrize("name", RULES)
def test_at_the_end_of_the_context_blocks_shrink_to_the_room(make_runner: MakeRunner, name: str) -> None:
    target = make_runner("plain", context=24)
    expected = [t.id for t in decode(target, PROMPT, max_new_tokens=14, stop_tokens=NEVER)]
    with target.start(PROMPT) as session:
        drafting = SameArchitectureDraft(make_runner("plain")).start(PROMPT, Sampling())
        options = DecodeOptions(make_length(name), 100, stop_tokens=NEVER)
        taken: list[int] = []
        with pytest.raises(ContextLengthError):
            for token in continue_decoding(session, drafting, PROMPT[-1], options, Statistics()):
                taken.append(token.id)
        assert taken[:14] == expected
        assert session.room == 0


def test_entropy_rules_stop_after_the_token_that_was_unsure(noisy: tuple[TargetRunner, SameArchitectureDraft]) -> None:
    """A threshold that no distribution meets leaves one token a step, one that all meet leaves the longest block."""
    target, draft = noisy
    for rule, drafted in ((SVIP(0.0), 1), (SVIP(100.0, longest=5), 5), (AdaEDL(threshold=1.0, epsilon=0), 1)):
        statistics = Statistics()
        options = {"k": rule, "max_new_tokens": 30, "stop_tokens": NEVER, "statistics": statistics}
        list(decode(target, PROMPT, draft=draft, **options))
        assert {step.drafted for step in statistics.steps[:-6]} == {drafted}


def test_a_rule_keeps_what_it_learnt_for_the_next_sequence(noisy: tuple[TargetRunner, SameArchitectureDraft]) -> None:
    target, draft = noisy
    rule = ExpectedGain()
    lengths = []
    for _ in range(3):
        statistics = Statistics()
        options = {"k": rule, "max_new_tokens": 30, "stop_tokens": NEVER, "statistics": statistics}
        list(decode(target, PROMPT, draft=draft, **options))
        lengths.append([step.drafted for step in statistics.steps])
    assert lengths[0][:6] == [8, 4, 1, 8, 4, 1]
    assert lengths[1][:6] != lengths[0][:6] and lengths[2][:6] != lengths[0][:6]
