"""Small checkpoints that vLLM's CPU build runs, with the embedded tokenizer."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec import embedded

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
KINDS = {
    "qwen3": {"num_hidden_layers": 3, "head_dim": 32},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        # vLLM's CPU attention has no heads of 16.
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "attention_multiplier": 0.125,
        "position_embedding_type": "rope",
    },
    "qwen3_5_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
}


def random_model(kind: str, seed: int = 0, weight: float = 0.15) -> PreTrainedModel:
    """Weights wide enough that the output depends on all that went before.

    Args:
        weight: standard deviation of the layers' matrices.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | KINDS[kind]), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, weight)
    return model.eval()


def share_vocabulary(models: list[PreTrainedModel], seed: int = 0) -> None:
    """Gives all models the same wide embeddings and heads: what follows a token then depends on it, and a little on
    what was before, so that they often agree.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, head = (torch.randn(SHAPE["vocab_size"], SHAPE["hidden_size"], generator=generator) for _ in range(2))
    with torch.no_grad():
        for model in models:
            model.get_input_embeddings().weight.copy_(embedding)
            model.get_output_embeddings().weight.copy_(head)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint folder."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.TARGET / name, folder / name)
    return folder
