"""Every draft strategy with every draft-length rule: the output is the target's own."""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from hybridspec import embedded
from hybridspec.decoding.draft import Draft, Drafting
from hybridspec.decoding.loop import decode
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.full_attention.segments import SegmentedVerification
from hybridspec.drafts.full_attention.token_probes import fit_segments
from hybridspec.drafts.prompt_lookup import PromptLookupDraft
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import IncompatiblePairError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.workloads.encoding import encode_prompt
from hybridspec.tuning.workloads.sources import find_workload
from tests.chi_square import FALSE_ALARM, p_value
from tests.drafting import generate
from tests.families import some_tokens
from tests.test_sampling_distribution import PROMPT, SAMPLES, VOCABULARY, exact

MakeRunner = Callable[..., TargetRunner]
STRATEGIES = ("same-architecture:draft-2-layers", "full-attention", "full-attention:none", "prompt-lookup")
RULES = ("3", "svip", "adaedl", "expected-gain:longest=4", "bandit")
WORKLOADS = tuple(embedded.workload_files())
NEVER: frozenset[int] = frozenset()
NEW = 24


@cache
def target() -> TargetRunner:
    return TargetRunner.from_pretrained(embedded.TARGET)


@cache
def draft(spec: str) -> Draft:
    return make_draft(spec, target())


@cache
def prompt(workload: str) -> list[int]:
    return encode_prompt(target(), find_workload(workload).prompts[0])[-200:]


@cache
def plain(workload: str) -> list[int]:
    return generate(target(), prompt(workload), NEW).tokens


@cache
def segments() -> SegmentedVerification:
    return fit_segments(target(), [prompt(workload) for workload in WORKLOADS], keep=0.8)


def check_greedy(strategy: str, rule: str, workload: str, cut: bool) -> None:
    statistics = Statistics()
    options = {"max_new_tokens": NEW, "stop_tokens": NEVER, "statistics": statistics}
    options |= {"verifier": segments()} if cut else {}
    tokens = decode(target(), prompt(workload), draft=draft(strategy), k=make_length(rule), **options)
    assert [t.id for t in tokens] == plain(workload)


PAIRS = list(product(STRATEGIES, RULES))
#: Every strategy and every rule at least once; the other pairs are slow.
USUAL = [pair for pair in PAIRS if pair[0] == STRATEGIES[0] or pair[1] == RULES[0]]


@pytest.mark.parametrize(
    ("strategy", "rule"), [pytest.param(*pair, marks=[] if pair in USUAL else pytest.mark.slow) for pair in PAIRS]
)
def test_greedy_output_is_plain_output(strategy: str, rule: str) -> None:
    """On one workload for each pair; every other pair with cut passes."""
    number = PAIRS.index((strategy, rule))
    check_greedy(strategy, rule, WORKLOADS[number % len(WORKLOADS)], cut=bool(number % 2))


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "segmented"])
@pytest.mark.parametrize(("strategy", "rule"), PAIRS)
def test_greedy_output_is_plain_output_everywhere(strategy: str, rule: str, cut: bool, workload: str) -> None:
    check_greedy(strategy, rule, workload, cut)


@pytest.mark.parametrize(
    ("strategy", "rule", "verification"),
    [
        ("small", "expected-gain:longest=2", "block"),
        ("lookup", "2", "token"),
        ("lookup", "bandit", "block"),
        ("small", "3", "token"),
        pytest.param("small", "expected-gain:longest=2", "token", marks=pytest.mark.slow),
        pytest.param("lookup", "2", "block", marks=pytest.mark.slow),
        pytest.param("lookup", "bandit", "token", marks=pytest.mark.slow),
        pytest.param("small", "3", "block", marks=pytest.mark.slow),
    ],
)
def test_sampled_output_follows_the_target(
    make_runner: MakeRunner, strategy: str, rule: str, verification: str
) -> None:
    small = make_runner("draft", layer_types=("full_attention",), vocabulary=VOCABULARY, seed=22, spread=0.2)
    drafts = {"small": SameArchitectureDraft(small), "lookup": PromptLookupDraft(longest=2, shortest=1)}
    model = make_runner("draft", vocabulary=VOCABULARY, seed=21, spread=0.2)
    generator, length = torch.Generator().manual_seed(7), make_length(rule)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    options = {"max_new_tokens": 3, "stop_tokens": NEVER, "sampling": Sampling(1.0), "generator": generator}
    for _ in range(SAMPLES):
        tokens = decode(model, PROMPT, draft=drafts[strategy], k=length, verification=verification, **options)
        first, second = next(tokens), next(tokens)
        tokens.close()
        counts[first.id, second.id] += 1
    assert p_value(counts, exact(model, Sampling(1.0))) > FALSE_ALARM


class Odd(Draft, Drafting):
    """Proposes what it was made to: nothing, always wrong tokens, or far too many."""

    name = "odd"

    def __init__(self, count: int) -> None:
        self.count = count

    def start(self, *_: object, **__: object) -> Drafting:
        return self

    def propose(self, k: int, proceed: object = None) -> Proposal:
        return Proposal([1] * self.count)

    def accept(self, accepted: int, token: int) -> None:
        return

    def snapshot(self) -> None:
        return

    restore = close = lambda self, *_: None


@pytest.mark.parametrize("count", [0, 3, 50])
@pytest.mark.parametrize("rule", RULES)
def test_odd_drafts_do_no_harm(make_runner: MakeRunner, count: int, rule: str) -> None:
    """Nothing proposed, always the same token, and more than is left to generate."""
    model = make_runner("plain")
    tokens = some_tokens(9)
    statistics = Statistics()
    options = {"max_new_tokens": 10, "stop_tokens": NEVER, "statistics": statistics}
    ours = [t.id for t in decode(model, tokens, draft=Odd(count), k=make_length(rule), **options)]
    assert ours == generate(model, tokens, 10).tokens
    assert all(s.drafted <= make_length(rule).longest for s in statistics.steps)


class Padded:
    """As much of a tokenizer as the pair check reads: fewer tokens than either model has rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.count)}


@pytest.mark.parametrize("rows", [80, 96, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies_are_one(make_model: Callable, rows: int, temperature: float) -> None:
    """A draft whose embedding has fewer or more rows beyond the 64 tokens that both tokenizers know."""
    tokenizer = Padded(64)
    model = TargetRunner(make_model("plain"), tokenizer)
    small = SameArchitectureDraft(TargetRunner(make_model("draft", vocabulary=rows), tokenizer))
    small.check_pair(model)
    tokens = [*some_tokens(5), 95]
    options = {"max_new_tokens": 16, "stop_tokens": NEVER, "sampling": Sampling(temperature)}
    ours = [t.id for t in decode(model, tokens, draft=small, k=3, **options)]
    assert len(ours) == 16
    if not temperature:
        assert ours == generate(model, tokens, 16).tokens
    with pytest.raises(IncompatiblePairError, match="vocab_size differs"):
        other = SameArchitectureDraft(TargetRunner(make_model("draft", vocabulary=48), Padded(64)))
        other.check_pair(model)
