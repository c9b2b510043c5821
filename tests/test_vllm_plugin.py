"""The proposer as vLLM would call it, without vLLM: histories in, drafts out, for rows that come, move and go."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridspec.decoding.draft_length import DraftLength
from hybridspec.engines.vllm import proposer as vllm_plugin
from hybridspec.engines.vllm.proposer import HybridDraftProposer
from hybridspec.engines.vllm.requests import PATIENCE
from hybridspec.errors import IncompatiblePairError, InputError
from hybridspec.runtime.runner import TargetRunner
from tests.tiny import VOCABULARY, tiny_model

K = 3
MakeProposer = Callable[..., HybridDraftProposer]


def config(
    vocabulary: int = VOCABULARY, max_length: int | None = None, hybrid: bool = False, **settings: object
) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"hybridspec": {"draft": "same-architecture:somewhere", **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary, max_model_len=max_length, is_hybrid=hybrid),
    )


@pytest.fixture
def make_proposer(monkeypatch: pytest.MonkeyPatch) -> MakeProposer:
    monkeypatch.setattr(TargetRunner, "from_pretrained", lambda *_, **__: TargetRunner(tiny_model()))
    return lambda **settings: HybridDraftProposer(config(**settings))


@pytest.fixture
def proposer(make_proposer: MakeProposer) -> HybridDraftProposer:
    return make_proposer()


def call(proposer: HybridDraftProposer, histories: list[list[int]], silent: tuple[int, ...] = ()) -> list[list[int]]:
    width = max(map(len, histories)) + K + 1
    table = np.zeros((len(histories), width), dtype=np.int32)
    for row, history in enumerate(histories):
        table[row, : len(history)] = history
    sampled = [[] if i in silent else [h[-1]] for i, h in enumerate(histories)]
    return proposer.propose(sampled, [len(h) for h in histories], table)


def greedy(history: list[int], count: int = K) -> list[int]:
    tokens = list(history)
    for _ in range(count):
        tokens.append(int(tiny_model()(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(history) :]


def test_drafts_equal_a_cacheless_greedy_continuation_over_partial_acceptance(proposer: HybridDraftProposer) -> None:
    history, rng = [5, 6, 7, 8], np.random.default_rng(0)
    for _ in range(12):
        (draft,) = call(proposer, [history])
        assert draft == greedy(history)
        kept = int(rng.integers(0, K + 1))
        history = [*history, *draft[:kept], int(rng.integers(3, VOCABULARY))]
    assert proposer.requests.opened == len(proposer.requests) == 1


def test_rows_may_move_pause_and_share_a_history(proposer: HybridDraftProposer) -> None:
    first, second, twin = [3, 4, 5], [3, 4, 5, 6, 7], [3, 4, 5]
    assert call(proposer, [first, second, twin]) == [greedy(first), greedy(second), greedy(twin)]
    first, second, twin = [*first, 9], [*second, 11, 12], [*twin, 10]
    assert call(proposer, [second, twin, first], silent=(1,)) == [greedy(second), [], greedy(first)]
    assert call(proposer, [twin, first]) == [greedy(twin), greedy(first)]


def test_requests_without_a_call_are_freed_and_come_back(proposer: HybridDraftProposer) -> None:
    stays, leaves = [3, 4, 5], [10, 11, 12]
    call(proposer, [stays, leaves])
    drafting = next(r.drafting for r in proposer.requests._open if r.tokens[0] == 10)
    for step in range(PATIENCE):
        assert len(proposer.requests) == 2
        stays = [*stays, 20 + step]
        call(proposer, [stays])
    assert len(proposer.requests) == proposer.requests.closed == 1
    assert drafting._session.tokens == []
    assert call(proposer, [[*leaves, 6]]) == [greedy([*leaves, 6])]


def test_the_number_of_sequences_is_bounded(make_proposer: MakeProposer) -> None:
    proposer = make_proposer(max_sequences=2)
    for start in range(5):
        call(proposer, [[10 + start, 4, 5]])
    assert len(proposer.requests) == 2
    assert proposer.requests.closed == 3
    assert sum(map(len, proposer.requests._by_key.values())) == 2
    assert call(proposer, [[10, 4, 5, 6]]) == [greedy([10, 4, 5, 6])]


def test_idle_state_is_freed(make_proposer: MakeProposer) -> None:
    proposer = make_proposer(idle_seconds=0.05)
    call(proposer, [[3, 4, 5], [6, 7, 8]])
    assert len(proposer.requests) == 2
    deadline = time.monotonic() + 5
    while len(proposer.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(proposer.requests) == 0
    assert proposer._timer is None


def test_lengths_are_ruled_request_by_request(
    proposer: HybridDraftProposer, make_proposer: MakeProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(DraftLength):
        """0, 1, 2, ... tokens; remembers what it is told."""

        name, longest = "counting", 8
        made: list["Counting"] = []

        def __init__(self) -> None:
            self.steps: list[tuple[int, int]] = []
            self.made.append(self)

        def limit(self) -> int:
            return len(self.steps)

        def observe(self, step: object) -> None:
            self.steps.append((step.drafted, step.accepted))

    monkeypatch.setattr("hybridspec.engines.vllm.proposer.make_length", lambda _: Counting())
    proposer = make_proposer(length="counting")
    Counting.made.clear()
    first, second = [3, 4, 5], [7, 8, 9]
    assert call(proposer, [first]) == [[]]
    for step in range(1, 6):
        first = [*first, *greedy(first, min(step - 1, K)), 30 + step]
        expected = [greedy(first)[: min(step, K)], greedy(second)[: step - 1 if step < K + 1 else K]]
        assert call(proposer, [first, second]) == expected
        second = [*second, 40 + step]
    mine, other = Counting.made
    assert mine.steps == [(0, 0), (1, 1), (2, 2), (3, 3), (3, 3)]
    assert [drafted for drafted, _ in other.steps] == [0, 1, 2, 3]


def test_a_rule_that_looks_at_drafts_stops_them(make_proposer: MakeProposer) -> None:
    assert [len(d) for d in call(make_proposer(length="svip:threshold=0"), [[5, 6, 7]])] == [1]
    assert [len(d) for d in call(make_proposer(length="svip:threshold=9"), [[5, 6, 7]])] == [K]


def test_prompt_lookup(make_proposer: MakeProposer) -> None:
    proposer = make_proposer(draft="prompt-lookup:longest=2")
    assert call(proposer, [[5, 6, 7, 8, 5, 6], [5, 6, 7]]) == [[7, 8, 5], []]
    assert call(proposer, [[5, 6, 7, 8, 5, 6, 7, 9, 7], [5, 6, 7, 6, 7]]) == [[], [6, 7, 6]]


def test_a_history_beyond_the_context_gets_no_draft(proposer: HybridDraftProposer) -> None:
    longest = TargetRunner(tiny_model()).max_length
    history = [3 + i % 50 for i in range(longest)]
    assert len(call(proposer, [history])[0]) <= 1
    assert call(proposer, [[*history, 4]]) == [[]]


def test_drafts_end_at_the_engines_context(make_proposer: MakeProposer) -> None:
    assert call(make_proposer(max_length=6), [[3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7]]) == [
        greedy([3, 4, 5], 2),
        greedy([3, 4, 5, 6], 1),
        [],
    ]


@pytest.mark.parametrize(
    ("version", "hybrid", "full"), [("0.32.0", True, True), ("0.32.0", False, False), ("0.33.1", True, False)]
)
def test_short_drafts_are_filled_up_where_an_engine_cannot_take_them(
    version: str, hybrid: bool, full: bool, make_proposer: MakeProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_plugin, "installed", lambda: ("vllm", version))
    proposer = make_proposer(draft="prompt-lookup:longest=2", hybrid=hybrid, max_length=12)
    first, second, third = [5, 6, 7, 8, 5, 6], [5, 6, 7], list(range(3, 13))
    drafts = call(proposer, [first, second, third, first], silent=(3,))
    # The third has room for one token more before the last.
    assert drafts == [[7, 8, 5], [7, 7, 7] if full else [], [12] if full else [], []]
    # What fills may be right by chance.
    grown = [*second, 7, 7, 9] if full else [*second, 9]
    opened = proposer.requests.opened
    call(proposer, [grown])
    assert proposer.requests.opened == opened


def test_settings_are_checked(make_proposer: MakeProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    for additional_config in ({}, {"hybridspec": None}, {"hybridspec": {"length": 3}}):
        with pytest.raises(InputError, match="--additional-config needs"):
            HybridDraftProposer(SimpleNamespace(additional_config=additional_config))
    for settings, message in [
        ({"lenght": 3}, "'lenght' is no setting"),
        ({"max_sequences": 0}, "max_sequences must be"),
        ({"idle_seconds": 0}, "idle_seconds must be"),
        ({"dtype": "bf17"}, "dtype must be"),
        ({"rollback": "none"}, "unknown rollback"),
        ({"length": "svipp"}, "Did you mean 'svip'"),
        ({"draft": "prompt-lookup:shortest=9"}, "n-grams need"),
        ({"draft": "full-attention"}, "full-attention drafts from the target's hidden states"),
        ({"draft": "mtp"}, "vLLM's own method"),
    ]:
        with pytest.raises(InputError, match=message):
            make_proposer(**settings)
    with pytest.raises(IncompatiblePairError, match="vocab_size"):
        make_proposer(vocabulary=50)
