"""A tiny random model of every family in transformers that speculation could meet, fp32, with all parts in use."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 97
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION = WIDTH | {"head_dim": 16, "max_position_embeddings": 512}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
FOUR = {"num_hidden_layers": 4, "layer_types": THREE_TO_ONE}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
KIMI = LATENT | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "num_experts_per_token": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
QWEN4 = (
    ATTENTION
    | DELTA
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "layer_types": [*THREE_TO_ONE[:3], "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    }
)
INKLING = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "route_scale": 1.0,
}
ZAMBA_LAYERS = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}

#: Name (a model type, and what is special after ``+``) -> what its config needs.
FAMILIES: dict[str, dict] = {
    # Gated delta rule.
    "qwen3_next": ATTENTION | DELTA | EXPERTS | FOUR,
    "qwen3_5_text": ATTENTION | DELTA | FOUR,
    "qwen3_5_moe_text": ATTENTION | DELTA | EXPERTS | FOUR,
    "qwen4_exp_text": QWEN4,
    "qwen4_exp_text+ple": QWEN4
    | {
        "ple_layer_ids": [2],
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "olmo_hybrid": WIDTH
    | FOUR
    | {
        "max_position_embeddings": 512,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "lara_mini": ATTENTION
    | DELTA
    | EXPERTS
    | {
        "num_hidden_layers": 5,
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ],
        "sliding_window": 8,
    },
    # Kimi delta attention.
    "kimi_linear": KIMI | FOUR | {"num_experts": 4},
    "bailing_hybrid": KIMI
    | FOUR
    | {"num_experts": 8, "num_expert_group": 2, "topk_group": 1, "layer_group_size": 4},
    "glm5_next": KIMI
    | {
        "num_hidden_layers": 4,
        "layer_types": [*THREE_TO_ONE[:3], "indexed_attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 0,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 64,
        "index_kpool": 4,
        "hc_mult": 2,
    },
    # Selective scan (Mamba-1).
    "mamba": {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 8},
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 8},
    "jamba": WIDTH
    | {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "zamba": {
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "layers_block_type": ZAMBA_LAYERS,
    },
    # SSD (Mamba-2).
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "bamba": WIDTH | SSD | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "granitemoehybrid": WIDTH
    | SSD
    | FOUR
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "attention_multiplier": 0.25,
    },
    "nemotron_h": WIDTH
    | {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "falcon_h1": WIDTH | SSD | {"num_hidden_layers": 4, "mamba_d_ssm": 128},
    "zamba2": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "layers_block_type": ZAMBA_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "use_mamba_kernels": False,
        "adapter_rank": 8,
        "use_mem_rope": True,
    },
    # Lightning attention, RG-LRU.
    "minimax+linear_first": ATTENTION | FOUR | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "minimax+full_first": ATTENTION
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
    },
    "recurrent_gemma": {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "lru_width": 64,
        "intermediate_size": 192,
        "attention_window_size": 8,
        "head_dim": 16,
    },
    # Short convolutions.
    "lfm2": WIDTH | CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": WIDTH
    | CONVOLUTIONS
    | {"moe_intermediate_size": 32, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2},
    "lfm3": ATTENTION
    | {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
        "sliding_window": 8,
    },
    "inkling_text": INKLING
    | {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "intermediate_size": 96,
        "n_shared_experts": 1,
        "logits_mup_width_multiplier": 1.0,
    },
    "inkling2_text": INKLING
    | {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "unpadded_vocab_size": VOCABULARY,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_loop_text": INKLING
    | {
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "unpadded_vocab_size": VOCABULARY,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    # No closed form here.
    "zaya": {k: v for k, v in ATTENTION.items() if k != "intermediate_size"}
    | {
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
    "rwkv": {"hidden_size": 64, "num_hidden_layers": 4, "attention_hidden_size": 64, "intermediate_size": 128},
    "xlstm": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_hidden_layers": 4,
        "num_blocks": 4,
        "num_heads": 4,
        "autocast_kernel_dtype": "float32",
    },
    "deepseek_v4": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.25,
        "num_nextn_predict_layers": 0,
    },
    # Attention only.
    "qwen3": ATTENTION | {"num_hidden_layers": 4},
    "gemma3_text": ATTENTION
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
}
#: Families without a tape: these run in ``recompute`` mode.
WITHOUT_TAPE = {"zaya", "rwkv", "xlstm", "deepseek_v4"}
#: Not drawn anew by :func:`shake`: decays, steps and the like, whose scale matters.
KEPT = ("A_log", ".D", "dt_bias", "slope_rate", "correction_bias", "balancing")


def shake(model: PreTrainedModel) -> None:
    """Random weights that make recurrence, convolution and every norm matter; the defaults leave them almost idle."""
    generator = torch.Generator().manual_seed(1234)

    def normal(parameter: torch.Tensor, scale: float) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("time_first", "time_decay", "recurrent_param")):
                normal(parameter, 0.5)
            elif "time_mix" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
            elif any(part in name for part in KEPT):
                continue
            elif "conv" in name and parameter.ndim >= 3:
                normal(parameter, 0.5)
            elif parameter.ndim >= 2:
                normal(parameter, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                normal(parameter, 0.1)


def model_type(name: str) -> str:
    return name.split("+")[0]


def is_known(name: str) -> bool:
    """Whether this version of transformers has the family."""
    return model_type(name) in CONFIG_MAPPING


@cache
def family_model(name: str) -> PreTrainedModel:
    """The shared model of a family; do not change it. Untied: a random model with tied embeddings repeats one token."""
    if not is_known(name):
        pytest.skip(f"this version of transformers has no {model_type(name)}")
    arguments = TOKENS | FAMILIES[name] | {"tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "glm5_next":
            model = _glm5_next(arguments)
        else:
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type(name)](**arguments))
    model = model.float().eval()
    shake(model)
    model.generation_config.eos_token_id = None
    return model


def _glm5_next(arguments: dict) -> PreTrainedModel:
    """It exists with a vision tower only."""
    config = CONFIG_MAPPING["glm5_next"](text_config=arguments)
    vision = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
    for key, value in (vision | {"out_hidden_size": 64}).items():
        if hasattr(config.vision_config, key):
            setattr(config.vision_config, key, value)
    return AutoModelForImageTextToText.from_config(config)
