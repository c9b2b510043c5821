"""Other model families, tiny and random: a checkpoint is refused when it is loaded, or every rollback of it is exact.

Some mixers silently ignore the cached state when they get more than one token, and no rollback can mend that.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hybridspec.errors import HybridspecError
from hybridspec.runner import TargetRunner
from tests import reference

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
DELTA = HYBRID | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

#: Model type -> what its config needs, and the modes that must work; the others may refuse.
FAMILIES: dict[str, tuple[dict, set[str]]] = {
    "llama": ({}, {"tape", "recompute"}),
    "mistral": ({"sliding_window": 8}, {"tape", "recompute"}),
    "qwen3_next": (DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}, {"tape", "recompute"}),
    "olmo_hybrid": (DELTA, {"tape", "recompute"}),
    "granitemoehybrid": (HYBRID | EXPERTS | MAMBA2, {"recompute"}),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {"recompute"}),
    "minimax": (HYBRID | EXPERTS, set()),
    "jamba": (EXPERTS | {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8}, set()),
    "mamba": ({"state_size": 8}, set()),
    "rwkv": ({"attention_hidden_size": 32}, set()),
}
MODES = ["tape", "recompute"]


def build(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **COMMON | FAMILIES[name][0])
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(2.0)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_refused_when_loaded_or_exact(tmp_path: Path, name: str) -> None:
    model = build(name)
    folder = tmp_path / name
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(64)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0"))).save_pretrained(folder)
    tokens = [(7 * i * i + 1) % 64 for i in range(25)]
    exact = reference.next_logits(model, [*tokens, 5, 9, 3])[-2:]
    for mode in MODES:
        try:
            runner = TargetRunner.from_pretrained(folder, rollback=mode)
        except HybridspecError as error:
            assert mode not in FAMILIES[name][1], f"{mode} is refused: {error}"
            assert name in str(error) or "layer 0" in str(error)
            continue
        with runner.start(tokens) as session:
            session.verify([tokens[-1], 5, 6, 7])
            session.commit(2)
            error = (session.verify([9, 3]) - exact).abs().max().item()
        assert error < 1e-4 * exact.std().item(), f"{mode} is silently wrong by {error:.1e}"
