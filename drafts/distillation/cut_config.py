"""The config of a model that keeps some of another's layers, in the words that its family uses for a layer sequence."""

import copy
from collections.abc import Callable, Sequence

from transformers import PreTrainedConfig

#: One entry for each layer.
PER_LAYER = (
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "mlp_layer_types",
    "indexer_types",
    "attn_type_list",
    "no_rope_layers",
)
#: Numbers of the layers that are special -> number of the first layer.
NUMBERS = {
    "attn_layer_indices": 0,
    "full_attn_idxs": 0,
    "hybrid_layer_ids": 0,
    "local_layer_ids": 0,
    "mlp_only_layers": 0,
    "ple_layer_ids": 1,
    "full_attn_layers": 1,
    "kda_layers": 1,
}
#: How many layers come before a border.
BORDERS = (
    "num_dense_layers",
    "first_k_dense_replace",
    "num_hash_layers",
    "loop_layer_index_start",
    "loop_layer_index_end",
)
#: A layer is special when its number modulo the period is the offset.
PERIODS = {"attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset"}
#: The last of so many layers is special.
INTERVALS = ("full_attention_interval", "layer_group_size")
#: Layers of multi-token prediction, which a cut model has not.
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def cut_config(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """The text config of a model of the layers ``kept``, an increasing list.

    Not every choice can be written in every family: compare what comes out with what was asked for.
    """
    before = config.to_dict()
    layers = config.num_hidden_layers
    after = _cut(before, layers, kept)
    if isinstance(before.get("linear_attn_config"), dict):
        after["linear_attn_config"] = _cut(before["linear_attn_config"], layers, kept)
    names = {"num_hidden_layers", getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")}
    after |= {name: len(kept) for name in {*names, "num_blocks"} if name in before}
    if before.get("block_types"):
        # RecurrentGemma repeats a short list for ever.
        after["block_types"] = [before["block_types"][i % len(before["block_types"])] for i in kept]
    if "decoder_sparse_step" in before:
        dense = before.get("mlp_only_layers") or []
        after["mlp_only_layers"] = [
            new for new, old in enumerate(kept) if old in dense or (old + 1) % before["decoder_sparse_step"]
        ]
        after["decoder_sparse_step"] = 1
    for name in ("architectures", "transformers_version", "_name_or_path"):
        after.pop(name, None)
    return type(config).from_dict(after)


def _cut(before: dict, layers: int, kept: Sequence[int]) -> dict:
    after = copy.deepcopy(before)
    for name, value in before.items():
        if name in PER_LAYER and value is not None and len(value) == layers:
            part = [value[i] for i in kept]
            after[name] = "".join(part) if isinstance(value, str) else part
        elif name in NUMBERS and value is not None:
            first = NUMBERS[name]
            after[name] = [new + first for new, old in enumerate(kept) if old + first in value]
        elif name in BORDERS and value is not None:
            after[name] = sum(old < value for old in kept)
        elif name in PREDICTORS and value:
            after[name] = 0
        elif name in PERIODS and value:
            offset = before[PERIODS[name]]
            if found := _period([old % value == offset for old in kept]):
                after[name], after[PERIODS[name]] = found
        elif name in INTERVALS and value:
            special = [(old + 1) % value == 0 for old in kept]
            found = _period(special, lambda period, offset: offset == period - 1)
            after[name] = found[0] if found else value
    return after


def _period(special: Sequence[bool], allowed: Callable[[int, int], bool] = lambda *_: True) -> tuple[int, int] | None:
    """(period, offset) so that exactly the special ones have number % period == offset; None if there is none."""
    for period in range(1, len(special) + 2):
        for offset in range(period):
            same = all((number % period == offset) == each for number, each in enumerate(special))
            if same and allowed(period, offset):
                return period, offset
    return None
