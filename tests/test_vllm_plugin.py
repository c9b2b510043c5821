"""The proposer as vLLM would call it, without vLLM: histories in, drafts out, for rows that come, move and go."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridspec import vllm_plugin
from hybridspec.errors import InputError
from hybridspec.runner import TargetRunner
from hybridspec.vllm_plugin import HybridDraftProposer
from tests.tiny import VOCABULARY, tiny_model

K = 3


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"hybridspec": {"draft": "somewhere"}},
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        **changes,
    )


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch) -> HybridDraftProposer:
    monkeypatch.setattr(TargetRunner, "from_pretrained", lambda *_, **__: TargetRunner(tiny_model()))
    return HybridDraftProposer(config())


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
    assert len(proposer._sequences) == 1


def test_rows_may_move_pause_and_share_a_history(proposer: HybridDraftProposer) -> None:
    first, second, twin = [3, 4, 5], [3, 4, 5, 6, 7], [3, 4, 5]
    assert call(proposer, [first, second, twin]) == [greedy(first), greedy(second), greedy(twin)]
    first, second, twin = [*first, 9], [*second, 11, 12], [*twin, 10]
    assert call(proposer, [second, twin, first], silent=(1,)) == [greedy(second), [], greedy(first)]
    assert call(proposer, [twin, first]) == [greedy(twin), greedy(first)]


def test_old_sequences_are_closed(proposer: HybridDraftProposer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "MAX_SESSIONS", 2)
    for start in range(5):
        call(proposer, [[10 + start, 4, 5]])
    assert len(proposer._sequences) == 2
    assert call(proposer, [[10, 4, 5, 6]]) == [greedy([10, 4, 5, 6])]


def test_a_history_beyond_the_context_gets_no_draft(proposer: HybridDraftProposer) -> None:
    history = [3 + i % 50 for i in range(proposer.runner.max_length)]
    assert len(call(proposer, [history])[0]) <= 1
    assert call(proposer, [[*history, 4]]) == [[]]


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--additional-config"):
        HybridDraftProposer(SimpleNamespace(additional_config={}))
    monkeypatch.setattr(TargetRunner, "from_pretrained", lambda *_, **__: TargetRunner(tiny_model(vocabulary=50)))
    with pytest.raises(InputError, match="vocab_size"):
        HybridDraftProposer(config())
