"""The layer sequence that the names of a checkpoint's tensors imply."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridspec.checkpoints.layer_kinds import LayerLayout

LAYER_NAME = re.compile(r"^(?P<prefix>(?:.*?\.)?(?:layers|blocks|h))\.(?P<index>\d+)\.(?P<rest>.+)$")


#: Parts of a checkpoint that have layers of their own beside the text decoder's.
OTHER_PARTS = re.compile(
    r"(^|[._])(visual|vision|vit|audio|image|mtp|encoder|speech|talker|code2wav|projector)([._]|$)"
)


#: Tensors that only a multi-token-prediction layer has, when it is numbered after the decoder's layers.
PREDICTION_PARTS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head"})


@dataclass(frozen=True)
class TensorLayers:
    """The decoder layers of a checkpoint, by the names of its tensors.

    Attributes:
        prefix: what stands before the index, for example ``model.layers``.
        names: index -> names after the index.
        prediction: indices of multi-token-prediction layers that are numbered after the decoder's.
        prediction_names: tensors of multi-token-prediction heads, by their full names.
    """

    prefix: str
    names: dict[int, frozenset[str]]
    prediction: tuple[int, ...] = ()
    prediction_names: frozenset[str] = field(default_factory=frozenset)

    def layout(self) -> LayerLayout:
        """From layer 0 to the last one that has tensors; a gap is None."""
        found = [layer_kind(self.names.get(index, frozenset())) for index in range(max(self.names, default=-1) + 1)]
        return LayerLayout(tuple(kind for kind, _ in found), "tensor names", tuple(mixer for _, mixer in found))


def group_tensors(names: Iterable[str]) -> TensorLayers:
    """Finds the decoder's layers among the names of a checkpoint's tensors."""
    groups: dict[str, dict[int, set[str]]] = {}
    prediction_names = set()
    for name in names:
        if re.search(r"(^|\.)mtp([._]|$)", name):
            prediction_names.add(name)
            continue
        match = LAYER_NAME.match(name)
        if match and not OTHER_PARTS.search(match["prefix"]):
            groups.setdefault(match["prefix"], {}).setdefault(int(match["index"]), set()).add(match["rest"])
    if not groups:
        return TensorLayers("", {}, (), frozenset(prediction_names))
    prefix = max(groups, key=lambda key: len(groups[key]))
    layers = {index: frozenset(rest) for index, rest in groups[prefix].items()}
    prediction = tuple(i for i in sorted(layers) if any(PREDICTION_PARTS & set(name.split(".")) for name in layers[i]))
    for index in prediction:
        prediction_names |= {f"{prefix}.{index}.{rest}" for rest in layers.pop(index)}
    return TensorLayers(prefix, layers, prediction, frozenset(prediction_names))


#: Mixer -> components of names of which one proves it; the first match counts. Names: what papers call them.
MIXER_PARTS: tuple[tuple[str, frozenset[str]], ...] = (
    ("RG-LRU", frozenset({"rg_lru", "linear_y", "conv_1d"})),
    ("WKV (RWKV-4)", frozenset({"time_decay", "time_first"})),
    ("mLSTM", frozenset({"igate_preact", "fgate_preact", "mlstm_layer"})),
    ("Kimi delta attention", frozenset({"f_a_proj", "f_b_proj", "f_proj", "forget_gate"})),
    (
        "gated delta rule",
        frozenset({"linear_attn", "in_proj_qkvz", "in_proj_qkv", "in_proj_ba", "in_proj_a", "in_proj_b"}),
    ),
    (
        "selective scan (Mamba-1)",
        frozenset({"x_proj", "x_proj_weight", "dt_proj", "dt_proj_weight", "dt_proj_bias", "dt_layernorm"}),
    ),
    ("lightning attention", frozenset({"slope_rate", "output_gate", "g_norm"})),
    ("SSD (Mamba-2)", frozenset({"A_log", "dt_bias", "D", "conv1d", "mamba", "in_proj"})),
)


KIMI_CONVOLUTIONS = frozenset({"q_conv1d", "k_conv1d", "v_conv1d"})


ATTENTION_PARTS = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "query_key_value",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "q_a_proj",
        "q_b_proj",
        "wq_b",
        "wkv",
        "wk_dv",
        "wq_du",
        "c_attn",
        "Wqkv",
        "qkv",
        "wqkv",
        "k_norm",
        "q_norm",
    }
)


CONVOLVED_ATTENTION = frozenset(
    {"k_sconv", "v_sconv", "attn_sconv", "mlp_sconv", "conv_qk_depthwise", "conv_qk_grouped", "v_proj_delayed"}
)


def layer_kind(names: frozenset[str]) -> tuple[str | None, str | None]:
    """Layer type and mixer that a layer's tensor names (without prefix and index) imply; None where they do not.

    A sliding window leaves no trace in names, so every plain attention is ``full_attention`` here.
    """
    # Per-layer embeddings have a convolution of their own, beside any mixer.
    parts = [set(name.split(".")) for name in names if not name.startswith("ple.")]
    together = set().union(*parts) if parts else set()
    if not together:
        return None, None
    if together & CONVOLVED_ATTENTION:
        return "hybrid", "short convolutions in attention"
    if "mamba_decoder" in together or "shared_transf" in together or "shared_transformer" in together:
        return "hybrid", _recurrence(together)
    if any({"conv"} <= path and len(path & {"conv", "in_proj", "out_proj", "weight", "bias"}) >= 2 for path in parts):
        return "conv", "short convolution"

    modules: dict[str, set[str]] = {}
    for name in names:
        if not name.startswith("ple."):
            head, _, rest = name.partition(".")
            modules.setdefault(head, set()).update(rest.split("."))
    recurrent = {head for head, inside in modules.items() if _is_recurrent(head, inside)}
    attention = {
        head
        for head, inside in modules.items()
        if head not in recurrent and (inside & ATTENTION_PARTS) and not _is_feed_forward(head)
    }
    mixer = _recurrence(set().union(*(modules[head] | {head} for head in recurrent))) if recurrent else None
    if recurrent and attention:
        return "hybrid", mixer
    if recurrent:
        return "linear_attention", mixer
    if attention:
        if "compressor" in together:
            return ("compressed_sparse_attention" if "indexer" in together else "heavily_compressed_attention"), None
        return ("indexed_attention" if "indexer" in together else "full_attention"), None
    if together & {"experts", "router", "shared_experts"}:
        return "moe", None
    if together & {"up_proj", "down_proj", "gate_proj"}:
        return "mlp", None
    return None, None


def _is_feed_forward(head: str) -> bool:
    return head in {"mlp", "feed_forward", "ffn", "block_sparse_moe", "mlp_block", "shared_mlp"}


def _is_recurrent(head: str, inside: set[str]) -> bool:
    if _is_feed_forward(head):
        return False
    if head in {"linear_attn", "mamba", "mlstm_layer"} or inside & KIMI_CONVOLUTIONS:
        return True
    strong = {"A_log", "dt_bias", "conv1d", "in_proj", *(part for _, parts in MIXER_PARTS[:-1] for part in parts)}
    return bool(inside & strong)


def _recurrence(together: set[str]) -> str | None:
    if together & KIMI_CONVOLUTIONS and "linear_attn" not in together:
        return "Kimi delta attention"
    return next((name for name, parts in MIXER_PARTS if together & parts), None)
