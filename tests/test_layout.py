"""Layer sequences in the field names that publishers use, and from tensor names."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec.checkpoints.config_layers import read_config, text_part
from hybridspec.checkpoints.layer_kinds import KNOWN, agree, compact, first_difference, runs
from hybridspec.checkpoints.tensor_layers import group_tensors, layer_kind
from tests.examples import examples

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MIXED = [LINEAR] * 3 + [FULL]

#: The fields of published configs, in small -> the sequence.
DIALECTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 4},
        MIXED * 2,
    ),
    "Qwen3.5, nested": (
        {
            "model_type": "qwen3_5",
            "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "layer_types": MIXED},
            "vision_config": {"depth": 27, "layer_types": ["full_attention"] * 27},
        },
        MIXED,
    ),
    "OLMo Hybrid": ({"model_type": "olmo_hybrid", "num_hidden_layers": 4, "layer_types": MIXED}, MIXED),
    "Kimi Linear": (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 5,
            "linear_attn_config": {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4], "head_dim": 128},
        },
        [*MIXED, LINEAR],
    ),
    "Bailing": ({"model_type": "bailing_hybrid", "num_hidden_layers": 6, "layer_group_size": 3}, [LINEAR] * 2 + [FULL]),
    "Jamba": (
        {"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
        [LINEAR] * 4 + [FULL] + [LINEAR] * 3,
    ),
    "Bamba": (
        {"model_type": "bamba", "num_hidden_layers": 5, "attn_layer_indices": [1, 4]},
        [LINEAR, FULL, LINEAR, LINEAR, FULL],
    ),
    "Granite 4": (
        {"model_type": "granitemoehybrid", "num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "attention"]},
        [LINEAR, LINEAR, FULL],
    ),
    "Nemotron-H": (
        {"model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M-M*-E"},
        [LINEAR, "mlp", LINEAR, FULL, "mlp", "moe"],
    ),
    "Falcon-H1": ({"model_type": "falcon_h1", "num_hidden_layers": 2}, ["hybrid"] * 2),
    "Zamba2": (
        {
            "model_type": "zamba2",
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "hybrid_layer_ids": [1, 3],
        },
        [LINEAR, "hybrid"] * 2,
    ),
    "Zamba": (
        {"model_type": "zamba", "num_hidden_layers": 9, "attn_layer_period": 6, "attn_layer_offset": 4},
        [LINEAR, LINEAR, "hybrid", LINEAR, LINEAR, LINEAR, LINEAR, "hybrid", LINEAR],
    ),
    "MiniMax-01": (
        {"model_type": "minimax_text_01", "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1]},
        MIXED,
    ),
    "RecurrentGemma": (
        {
            "model_type": "recurrent_gemma",
            "num_hidden_layers": 5,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        [LINEAR, LINEAR, SLIDING, LINEAR, LINEAR],
    ),
    "LFM2": (
        {"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [2]},
        ["conv", "conv", FULL, "conv"],
    ),
    "LFM3": (
        {"model_type": "lfm3", "num_hidden_layers": 3, "layer_types": ["conv", FULL, SLIDING]},
        ["conv", FULL, SLIDING],
    ),
    "Inkling": (
        {
            "model_type": "inkling_mm_model",
            "text_config": {"model_type": "inkling_text", "num_hidden_layers": 3, "local_layer_ids": [0, 1]},
        },
        ["hybrid_sliding", "hybrid_sliding", "hybrid"],
    ),
    "GLM-5-Next": (
        {
            "model_type": "glm5_next",
            "text_config": {"num_hidden_layers": 2, "layer_types": [LINEAR, "deepseek_sparse_attention"]},
        },
        [LINEAR, "indexed_attention"],
    ),
    "Mamba": ({"model_type": "mamba", "n_layer": 3, "num_hidden_layers": 3}, [LINEAR] * 3),
    "Mamba-2": ({"model_type": "mamba2", "num_hidden_layers": 3}, [LINEAR] * 3),
    "FalconMamba": ({"model_type": "falcon_mamba", "num_hidden_layers": 3}, [LINEAR] * 3),
    "RWKV": ({"model_type": "rwkv", "num_hidden_layers": 2}, [LINEAR] * 2),
    "xLSTM": ({"model_type": "xlstm", "num_blocks": 2}, [LINEAR] * 2),
    "Zaya": ({"model_type": "zaya", "num_hidden_layers": 2}, ["hybrid"] * 2),
    "Gemma 3": (
        {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window_pattern": 3},
        [SLIDING, SLIDING, FULL] * 2,
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_published_field_names(name: str) -> None:
    config, expected = DIALECTS[name]
    reading = read_config(config)
    assert not reading.problems
    expected = expected * (6 // len(expected)) if name == "Bailing" else expected
    assert list(reading.layout.kinds) == expected
    assert all(first_difference(layout.kinds, expected) is None for layout in reading.layouts)


@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - {"MiniMax-01", "Inkling", "GLM-5-Next"}))
def test_transformers_reads_the_same_sequence(name: str) -> None:
    """Where it knows the model type and its defaults build."""
    config, _ = DIALECTS[name]
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    built = CONFIG_MAPPING[config["model_type"]](**json.loads(json.dumps(config))).get_text_config(decoder=True)
    theirs = getattr(built, "layer_types", None)
    if theirs is not None:
        assert first_difference(read_config(config).layout.kinds, theirs) is None


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"num_hidden_layers": 2, "layer_types": ["conv", "magic"]}, "layer_types", "magic"),
        ({"num_hidden_layers": 2, "layer_types": "conv"}, "layer_types", "must be a list"),
        ({"num_hidden_layers": 2, "hybrid_override_pattern": "MZ"}, "hybrid_override_pattern", "Z"),
        ({"num_hidden_layers": 2, "attn_type_list": [0, 7]}, "attn_type_list", "7"),
        ({"num_hidden_layers": 2, "attn_layer_indices": [2]}, "attn_layer_indices", "layer 2 of 2"),
        ({"num_hidden_layers": 2, "attn_layer_period": 0}, "attn_layer_period", "is 0"),
        ({"num_hidden_layers": 2, "attn_layer_period": "often"}, "attn_layer_period", "often"),
        ({"full_attn_idxs": [1]}, "full_attn_idxs", "num_hidden_layers is missing"),
        (
            {"num_hidden_layers": 2, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}},
            "linear_attn_config",
            "twice",
        ),
        (
            {"num_hidden_layers": 2, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": []}},
            "linear_attn_config",
            "no kind for layer 2",
        ),
    ],
)
def test_nonsense_is_named(config: dict, field: str, words: str) -> None:
    reading = read_config(config)
    assert [name for name, _ in reading.problems] == [field]
    assert words in reading.problems[0][1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.text(max_size=4) | st.sampled_from(sorted(KNOWN)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["kda_layers", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)
FIELDS = (
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_type_list",
    "linear_attn_config",
    "block_types",
    "attn_layer_indices",
    "full_attn_idxs",
    "attn_layer_period",
    "attn_layer_offset",
    "full_attention_interval",
    "sliding_window_pattern",
    "num_hidden_layers",
    "model_type",
    "text_config",
)


@examples(150)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_values_are_read_or_refused(config: dict[str, Any]) -> None:
    reading = read_config(config)
    for layout in reading.layouts:
        assert set(layout.kinds) <= KNOWN
    assert all(text for _, text in reading.problems)


@examples(100)
@given(st.lists(st.sampled_from(["a", "b"]), max_size=24))
def test_the_compact_form_says_the_sequence(kinds: list[str]) -> None:
    text = compact(kinds)
    spelt: list[str] = []
    head, _, rest = text.partition(" x (")
    if rest:
        pattern, _, tail = rest.partition(")")
        spelt = spell(pattern) * int(head) + spell(tail.removeprefix(" + "))
    elif kinds:
        spelt = spell(text)
    assert spelt == kinds
    assert sum(count for _, count in runs(kinds)) == len(kinds)


def spell(text: str) -> list[str]:
    return [kind for part in text.split(" + ") if part for count, kind in [part.split(" ")] for _ in range(int(count))]


def test_first_difference() -> None:
    assert first_difference([LINEAR, FULL], [LINEAR, FULL]) is None
    assert first_difference([LINEAR, SLIDING], [LINEAR, FULL]) is None, "a window leaves no trace in names"
    assert first_difference([LINEAR, FULL], [LINEAR, LINEAR]) == 1
    assert first_difference([LINEAR], [LINEAR, LINEAR]) == 1
    assert not agree("conv", LINEAR) and not agree("mlp", "moe") and agree(None, FULL)


#: Names of published checkpoints -> kind and mixer.
NAMES: dict[str, tuple[list[str], str, str | None]] = {
    "Qwen3-Next": (
        ["linear_attn.in_proj_qkvz.weight", "linear_attn.A_log", "mlp.gate.weight"],
        LINEAR,
        "gated delta rule",
    ),
    "Kimi": (
        ["self_attn.q_conv1d.weight", "self_attn.A_log", "self_attn.q_proj.weight"],
        LINEAR,
        "Kimi delta attention",
    ),
    "Kimi, full": (["self_attn.kv_a_proj_with_mqa.weight", "self_attn.q_proj.weight"], FULL, None),
    "Jamba": (["mamba.x_proj.weight", "mamba.A_log", "feed_forward.router.weight"], LINEAR, "selective scan (Mamba-1)"),
    "Bamba": (["mamba.in_proj.weight", "mamba.A_log", "mamba.dt_bias"], LINEAR, "SSD (Mamba-2)"),
    "Falcon-H1": (["mamba.A_log", "mamba.in_proj.weight", "self_attn.k_proj.weight"], "hybrid", "SSD (Mamba-2)"),
    "Nemotron-H, MLP": (["mixer.up_proj.weight", "mixer.down_proj.weight", "norm.weight"], "mlp", None),
    "Nemotron-H, experts": (["mixer.experts.0.up_proj.weight", "mixer.gate.weight"], "moe", None),
    "Nemotron-H, attention": (["mixer.q_proj.weight", "mixer.o_proj.weight"], FULL, None),
    "MiniMax": (["self_attn.qkv_proj.weight", "self_attn.output_gate.weight"], LINEAR, "lightning attention"),
    "RecurrentGemma": (["temporal_block.rg_lru.recurrent_param", "temporal_block.linear_y.weight"], LINEAR, "RG-LRU"),
    "LFM2": (["conv.conv.weight", "conv.in_proj.weight", "conv.out_proj.weight"], "conv", "short convolution"),
    "GPT-2": (["attn.c_attn.weight", "mlp.c_fc.weight"], FULL, None),
}


@pytest.mark.parametrize("name", NAMES)
def test_published_tensor_names(name: str) -> None:
    names, kind, mixer = NAMES[name]
    assert layer_kind(frozenset(names)) == (kind, mixer)


def test_other_parts_of_a_checkpoint_are_left_aside() -> None:
    names = [
        *(f"model.visual.blocks.{i}.attn.qkv.weight" for i in range(27)),
        *(f"model.language_model.layers.{i}.linear_attn.A_log" for i in range(3)),
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.fc.weight",
        "model.language_model.layers.3.eh_proj.weight",
        "model.language_model.layers.3.self_attn.q_proj.weight",
        "lm_head.weight",
    ]
    found = group_tensors(names)
    assert found.prefix == "model.language_model.layers"
    assert sorted(found.names) == [0, 1, 2] and found.prediction == (3,)
    assert len(found.prediction_names) == 4
    assert group_tensors([]).layout().kinds == ()


def test_the_text_part_of_nested_configs() -> None:
    inner = {"num_hidden_layers": 3}
    assert text_part({"text_config": inner}) == inner
    assert text_part({"thinker_config": {"text_config": inner}}) == inner
    assert text_part(inner) == inner
    assert text_part({"text_config": "nonsense"}) == {"text_config": "nonsense"}
