"""Load time: models that the tape does not fit are refused by name, whatever the reason."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BambaConfig, PreTrainedModel, Qwen3Config, RecurrentGemmaConfig

from hybridspec import cache
from hybridspec.errors import UnsupportedLayerError
from hybridspec.recurrence import tape as tape_module
from hybridspec.runner import TargetRunner
from hybridspec.selftest import check_rollback
from tests.tiny import tiny_model


def build(config: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def bamba() -> PreTrainedModel:
    return build(
        BambaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
        )
    )


def test_gated_delta_and_dense_models_pass() -> None:
    check_rollback(TargetRunner(tiny_model()))
    dense = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    check_rollback(TargetRunner(build(dense)))


def test_half_precision_passes() -> None:
    check_rollback(TargetRunner(copy.deepcopy(tiny_model()).bfloat16()))


def test_an_unknown_recurrence_is_refused_by_layer_and_class() -> None:
    with pytest.raises(UnsupportedLayerError, match=r"layer 0 .*Bamba.*recompute"):
        TargetRunner(bamba())


def test_recompute_serves_what_the_tape_does_not() -> None:
    runner = TargetRunner(bamba(), rollback="recompute")
    tokens = [5, 9, 3, 22, 41, 8]
    with runner.start(tokens[:4]) as session:
        session.verify([tokens[3], tokens[4], 60, 61])
        session.commit(2)
        logits = session.verify(tokens[5:])[-1]
    with torch.inference_mode():
        expected = runner.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_known_layer_types_is_refused() -> None:
    config = RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, lru_width=32
    )
    with pytest.raises(UnsupportedLayerError, match="recompute"):
        check_rollback(TargetRunner(build(config)))


def test_a_wrong_rollback_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does today: the recurrent state keeps the rejected tokens."""
    right = tape_module.rollback

    def stale(state: torch.Tensor | None, tape: tape_module.Tape, keep: int) -> torch.Tensor:
        return right(state, tape, tape.key.shape[-2])

    monkeypatch.setattr(cache, "rollback", stale)
    with pytest.raises(UnsupportedLayerError, match="after a rollback"):
        check_rollback(TargetRunner(tiny_model()))
