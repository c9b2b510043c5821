"""A tiny random model of every family in transformers that speculation could meet, fp32, with all parts in use."""

import copy
import inspect
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import ModelOutput

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.runtime.runner import TargetRunner
from tests.reference import next_logits

#: A version of transformers that takes every config below; an older one may refuse some.
WRITTEN_FOR = Version("5.24")
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
    "qwen3_5": ATTENTION | DELTA | FOUR,
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
    "bailing_hybrid": KIMI | FOUR | {"num_experts": 8, "num_expert_group": 2, "topk_group": 1, "layer_group_size": 4},
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
        # More than any test has tokens, here and below: scores below zero are all zero, and such ties flip by rounding.
        "index_topk": 256,
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
        "time_step_min": 1e-30,
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
        "time_step_min": 1e-30,
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
        "index_topk": 256,
        "hc_mult": 2,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.25,
        "num_nextn_predict_layers": 0,
    },
    # Attention only.
    "mistral": WIDTH | {"num_hidden_layers": 2, "sliding_window": 8},
    "qwen3": ATTENTION | {"num_hidden_layers": 4},
    "gemma3_text": ATTENTION
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
}
# The two clamp time steps from below in their many-token path; above, so far down that no step is ever reached.
CLAMPED = {"nemotron_h+clamped", "zamba2+clamped"}
FAMILIES |= {name: FAMILIES[name.split("+")[0]] | {"time_step_min": 0.05} for name in sorted(CLAMPED)}

VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
#: Families with a vision tower, which no test here uses -> its config. The one above is that of their text part.
MULTIMODAL = {"glm5_next": VISION | {"projection_intermediate_size": 64}, "qwen3_5": VISION}

MODES = ("tape", "slots", "recompute")
#: One of each kind of layer, for what does not depend on the modeling file: tests try the others under ``slow``.
USUAL = {
    "qwen3_5",
    "kimi_linear",
    "bamba",
    "nemotron_h+clamped",
    "falcon_h1",
    "jamba",
    "zamba",
    "minimax+linear_first",
    "recurrent_gemma",
    "lfm2",
    "inkling_text",
    "gemma3_text",
    "qwen3_5_moe_text",
}
#: Families without a tape: these run in ``recompute`` mode only.
WITHOUT_TAPE = {"zaya", "rwkv", "xlstm", "deepseek_v4"}
#: Not drawn anew by :func:`shake`: decays, steps and the like, whose scale matters.
KEPT = ("A_log", ".D", "dt_bias", "slope_rate", "correction_bias", "balancing")


def shake(model: PreTrainedModel) -> None:
    """Random weights that make recurrence, convolution and every norm matter; the defaults leave them almost idle."""
    generator = torch.Generator().manual_seed(1234)
    # Its halves by gates would let the last token alone decide what follows.
    gain = 2.0 if model.config.model_type == "rwkv" else 1.0

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
            elif name.endswith(".temp"):
                # Zaya multiplies its keys with it, and starts from 0.
                parameter.fill_(1.5)
            elif "conv" in name and parameter.ndim >= 3:
                normal(parameter, 0.5)
            elif parameter.ndim >= 2:
                normal(parameter, 1.0 if "embed" in name else gain * parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                normal(parameter, 0.1)


def model_type(name: str) -> str:
    return name.split("+")[0]


def is_known(name: str) -> bool:
    """Whether this version of transformers has the family."""
    return model_type(name) in CONFIG_MAPPING


@cache
def family_model(name: str) -> PreTrainedModel:
    """The shared model of a family; do not change it. Untied: a random model with tied embeddings repeats one token.

    Skips the test where transformers is too old for it.
    """
    return _model(name, FAMILIES[name])


@cache
def half_precision_model(name: str) -> PreTrainedModel:
    """In bf16 but for what transformers keeps in fp32; each token goes to all experts, for rounding flips a choice."""
    config = FAMILIES[name]
    counts = ("num_experts", "n_routed_experts", "num_local_experts")
    every = next((config[key] for key in counts if key in config), None)
    chosen = {key: every for key in ("num_experts_per_tok", "num_experts_per_token") if config.get(key, 1) > 1}
    if "topk_group" in config:
        chosen["topk_group"] = config.get("num_expert_group", config.get("n_group"))
    full = _model(name, config | chosen)
    kept = "|".join(full._keep_in_fp32_modules_strict or ()).replace("*", r"\w+")
    model = copy.deepcopy(full).bfloat16()
    for (key, parameter), original in zip(model.named_parameters(), full.parameters(), strict=True):
        if kept and re.search(rf"(^|\.)({kept})(\.|$)", key):
            parameter.data = original.data
    try:
        next_logits(model, [3])
    except RuntimeError as error:
        _skip_if_old(f"does not run it in bf16: {error}", error)
    return model


def _model(name: str, config: dict) -> PreTrainedModel:
    if not is_known(name):
        _skip_if_old(f"has no {model_type(name)}", KeyError(name))
    arguments = TOKENS | config | {"tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = build(name, arguments)
        except Exception as error:
            _skip_if_old(f"refuses the config: {' '.join(str(error).split())}", error)
    model = model.float().eval()
    shake(model)
    model.generation_config.eos_token_id = None
    return model


def _skip_if_old(reason: str, error: Exception) -> NoReturn:
    if Version(transformers.__version__) >= WRITTEN_FOR:
        raise error
    pytest.skip(f"transformers {transformers.__version__} {reason}")


def build(name: str, arguments: dict) -> PreTrainedModel:
    """A model of the family with transformers' own random weights."""
    config = CONFIG_MAPPING[model_type(name)]
    if name not in MULTIMODAL:
        return AutoModelForCausalLM.from_config(config(**arguments))
    vision = config.sub_configs["vision_config"](**MULTIMODAL[name])
    return AutoModelForImageTextToText.from_config(config(text_config=arguments, vision_config=vision.to_dict()))


@cache
def noisy_model(name: str, noise: float) -> PreTrainedModel:
    """A copy with ``noise`` of each matrix's own scale added: as a draft it is often, not always, right."""
    model = copy.deepcopy(family_model(name))
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


def modes(name: str) -> tuple[str, ...]:
    """The rollback modes that serve a family."""
    return ("recompute",) if name in WITHOUT_TAPE else MODES


@cache
def family_runner(name: str, mode: str, noise: float = 0.0) -> TargetRunner:
    return TargetRunner(noisy_model(name, noise) if noise else family_model(name), rollback=mode)


def native_pass(
    model: PreTrainedModel, tokens: list[int], position: int | None = 0, cache: object = None
) -> ModelOutput:
    """A pass of transformers' own on the cache that an earlier one returned, with explicit positions unless None."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, object] = {}
    if "position_ids" in parameters and position is not None:
        options["position_ids"] = torch.arange(position, position + len(tokens)).unsqueeze(0)
    if cache is not None:
        options[next(name for name in CACHE_ARGUMENTS if name in parameters)] = cache
    return model(input_ids=torch.tensor([tokens]), use_cache=True, **options)


def native_cache(output: ModelOutput) -> object:
    """What a pass returned as its past; None if the model keeps it on its modules."""
    return next((getattr(output, name) for name in CACHE_ARGUMENTS if getattr(output, name, None) is not None), None)


@torch.no_grad()
def decoded_logits(model: PreTrainedModel, tokens: list[int], prompt: int) -> torch.Tensor:
    """Logits after ``tokens[prompt - 1:]`` as transformers decodes: what comes before in one pass, then one by one."""
    output = native_pass(model, tokens[: prompt - 1])
    rows = []
    for position in range(prompt - 1, len(tokens)):
        output = native_pass(model, tokens[position : position + 1], position, native_cache(output))
        rows.append(output.logits[0])
    return torch.cat(rows)


def some_tokens(count: int, seed: int = 7) -> list[int]:
    # Above the special tokens: one model looks for the end of a text in its own input.
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def wrong(tokens: Sequence[int]) -> list[int]:
    """A different token for each."""
    return [3 + (token - 3 + 11) % (VOCABULARY - 3) for token in tokens]


def exact_logits(name: str, tokens: list[int], prompt: int, model: PreTrainedModel | None = None) -> torch.Tensor:
    """Logits after each of ``tokens`` from ``prompt - 1`` on: one pass without cache, or what decoding computes where
    that is another function.
    """
    model = model or family_model(name)
    if name in CLAMPED:
        return decoded_logits(model, tokens, prompt)
    return next_logits(model, tokens)[prompt - 1 :]
