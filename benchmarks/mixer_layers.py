"""One layer of a real model for each mixer family, as a config of transformers."""

from dataclasses import dataclass

VOCABULARY = 64


@dataclass(frozen=True)
class MixerLayer:
    """One layer of a real model.

    ``real`` and ``tiny`` are the fields of the config that set its dimensions; ``mixer`` ends the mixer's class name.
    ``copied``: transformers keeps its past in a plain cache, so the naive way exists.
    """

    model: str
    model_type: str
    mixer: str
    common: dict
    real: dict
    tiny: dict
    copied: bool = True


LAYERS = {
    # hf.co/Qwen/Qwen3.5-27B: 48 value heads and 16 key heads of 128.
    "gated delta rule": MixerLayer(
        "Qwen3.5-27B",
        "qwen3_5_text",
        "GatedDeltaNet",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        {
            "hidden_size": 5120,
            "linear_num_value_heads": 48,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {
            "hidden_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    # hf.co/moonshotai/Kimi-Linear-48B-A3B-Instruct: 32 heads of 128.
    "Kimi delta attention": MixerLayer(
        "Kimi-Linear-48B-A3B",
        "kimi_linear",
        "DeltaAttention",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        {"hidden_size": 2304, "linear_num_heads": 32, "linear_head_dim": 128},
        {"hidden_size": 64, "linear_num_heads": 4, "linear_head_dim": 16},
    ),
    # hf.co/nvidia/Nemotron-H-8B-Base-8K: 128 heads of 64, state of 128, 8 groups.
    "SSD": MixerLayer(
        "Nemotron-H-8B",
        "nemotron_h",
        "Mamba2Mixer",
        {
            "layers_block_type": ["linear_attention", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "use_mamba_kernels": False,
        },
        {
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
        },
        {"hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    ),
    # hf.co/ai21labs/Jamba-v0.1: inner width of 8192, state of 16.
    "selective scan": MixerLayer(
        "Jamba-v0.1",
        "jamba",
        "MambaMixer",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "use_mamba_kernels": False,
        },
        {"hidden_size": 4096, "mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 256},
        {"hidden_size": 64, "mamba_expand": 2, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    # hf.co/MiniMaxAI/MiniMax-Text-01: 64 heads of 128.
    "lightning attention": MixerLayer(
        "MiniMax-Text-01",
        "minimax",
        "LightningAttention",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 1, "num_experts_per_tok": 1},
        {"hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        copied=False,
    ),
    # hf.co/google/recurrentgemma-9b: width of 4096, 16 blocks of gates.
    "RG-LRU": MixerLayer(
        "RecurrentGemma-9B",
        "recurrent_gemma",
        "RecurrentBlock",
        {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
        {"hidden_size": 4096, "lru_width": 4096, "num_attention_heads": 16, "head_dim": 256},
        {"hidden_size": 64, "lru_width": 64, "num_attention_heads": 4, "head_dim": 16},
        copied=False,
    ),
    # hf.co/LiquidAI/LFM2-2.6B: width of 2048, window of 3.
    "short convolution": MixerLayer(
        "LFM2-2.6B",
        "lfm2",
        "ShortConv",
        {
            "layer_types": ["conv", "full_attention"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        {"hidden_size": 2048},
        {"hidden_size": 64},
    ),
}
AROUND = {
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
