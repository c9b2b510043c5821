"""The layer sequence of a model: as its config tells it, in any dialect, and as the names of its tensors imply it.

Plain Python on plain data: nothing is built, no weight is read, and a model type that transformers does not know is
read all the same.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Older and publishers' names of layer types -> transformers' names.
RENAMED = {
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "recurrent": "linear_attention",
    "linear": "linear_attention",
    "kda": "linear_attention",
    "attention": "full_attention",
    "full": "full_attention",
    "attn": "full_attention",
    "swa": "sliding_attention",
    "sliding": "sliding_attention",
    "short_conv": "conv",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
ATTENTION = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "window_attention",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "reference_sliding_attention",
    }
)
HYBRID = frozenset({"hybrid", "hybrid_sliding"})
RECURRENT = frozenset({"linear_attention"})
#: Every name that a sequence may hold.
KNOWN = ATTENTION | HYBRID | RECURRENT | {"conv", "mlp", "moe", "dense", "sparse"}
#: Letters of NVIDIA's patterns.
PATTERN_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
#: Where a composite config keeps the part that generates text.
TEXT_KEYS = ("text_config", "language_config", "llm_config", "language_model", "decoder")


@dataclass(frozen=True)
class LayerLayout:
    """A layer sequence.

    Attributes:
        kinds: one transformers layer type per layer; None for a layer that could not be told.
        source: the field or rule that it was read from.
        mixers: what mixes tokens in each layer, by its tensors; empty if read from a config.
    """

    kinds: tuple[str | None, ...]
    source: str
    mixers: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def compact(self) -> str:
        """Runs, with a repeated pattern named once: ``6 x (3 linear_attention + 1 full_attention)``."""
        return compact(self.kinds)

    def counts(self) -> dict[str, int]:
        return dict(Counter(kind or "unknown" for kind in self.kinds))

    @property
    def recurrent(self) -> bool:
        """Some layer keeps a state or a window that a cache crop does not take back."""
        return any(kind in RECURRENT | HYBRID | {"conv"} for kind in self.kinds)


def runs(kinds: Sequence[str | None]) -> list[tuple[str, int]]:
    """Neighbours of one kind, counted."""
    found: list[tuple[str, int]] = []
    for kind in kinds:
        name = kind or "unknown"
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found


def compact(kinds: Sequence[str | None]) -> str:
    best = " + ".join(f"{count} {kind}" for kind, count in runs(kinds)) or "no layers"
    for period in range(2, len(kinds) // 2 + 1):
        repeats = len(kinds) // period
        if list(kinds[: period * repeats]) == list(kinds[:period]) * repeats:
            pattern = " + ".join(f"{count} {kind}" for kind, count in runs(kinds[:period]))
            rest = runs(kinds[period * repeats :])
            text = " + ".join([f"{repeats} x ({pattern})", *(f"{count} {kind}" for kind, count in rest)])
            # The shortest period comes first; a single run repeats nothing.
            return text if len(runs(kinds)) > 1 else best
    return best


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text decoder; the whole if it is not nested."""
    for key in TEXT_KEYS:
        part = config.get(key)
        if isinstance(part, Mapping):
            return text_part(part)
    thinker = config.get("thinker_config")
    return text_part(thinker) if isinstance(thinker, Mapping) else config


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Layers that the config counts, by any of the names in use."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"):
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


@dataclass(frozen=True)
class Dialect:
    """A way of writing a layer sequence.

    Attributes:
        fields: names in config.json; the first one marks the dialect.
        read: from the text config and its number of layers to the kinds; raises ValueError or TypeError for nonsense.
        whole: it writes the sequence out, so it must agree with every other field that does.
    """

    fields: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int | None], list[str]]
    whole: bool = False

    def applies(self, config: Mapping[str, Any]) -> bool:
        return config.get(self.fields[0]) is not None

    @property
    def name(self) -> str:
        return ", ".join(self.fields)


def renamed(kinds: Iterable[Any]) -> list[str]:
    return [RENAMED.get(kind, kind) for kind in map(str, kinds)]


def _listed(key: str) -> Callable[[Mapping[str, Any], int | None], list[str]]:
    def read(config: Mapping[str, Any], count: int | None) -> list[str]:
        value = config[key]
        if not isinstance(value, list):
            raise TypeError(f"{key} must be a list, not {type(value).__name__}")
        return renamed(value)

    return read


def _cyclic(config: Mapping[str, Any], count: int | None) -> list[str]:
    """RecurrentGemma's block_types repeat; its attention looks back one window."""
    block = ["sliding_attention" if kind == "attention" else kind for kind in config["block_types"]]
    return renamed((block * (_needed(count) // max(1, len(block)) + 1))[: _needed(count)])


def _pattern(config: Mapping[str, Any], count: int | None) -> list[str]:
    # A bar or slash parts pipeline stages and prediction heads; the heads are no layers of the decoder.
    letters = str(config["hybrid_override_pattern"]).split("/")[0].replace("|", "")
    return [PATTERN_LETTERS.get(letter, letter) for letter in letters]


def _needed(count: int | None) -> int:
    if count is None:
        raise ValueError("num_hidden_layers is missing")
    return count


def _indices(key: str, at: str, otherwise: str) -> Callable[[Mapping[str, Any], int | None], list[str]]:
    def read(config: Mapping[str, Any], count: int | None) -> list[str]:
        chosen = {int(index) for index in config[key]}
        if chosen and not 0 <= min(chosen) <= max(chosen) < _needed(count):
            raise ValueError(f"{key} names layer {max(chosen)} of {count}")
        return [at if index in chosen else otherwise for index in range(_needed(count))]

    return read


def _period(config: Mapping[str, Any], count: int | None) -> list[str]:
    period, offset = int(config["attn_layer_period"]), int(config.get("attn_layer_offset") or 0)
    if period < 1:
        raise ValueError(f"attn_layer_period is {period}")
    if config.get("model_type") == "zamba":
        # Zamba's period counts from its fourth layer on.
        first = ["linear_attention", "linear_attention", "hybrid"]
        rest = ["hybrid" if i % period == offset else "linear_attention" for i in range(_needed(count) - 3)]
        return [*first, *rest][: _needed(count)]
    return ["full_attention" if i % period == offset else "linear_attention" for i in range(_needed(count))]


def _every(key: str, at: str, otherwise: str) -> Callable[[Mapping[str, Any], int | None], list[str]]:
    def read(config: Mapping[str, Any], count: int | None) -> list[str]:
        step = int(config[key])
        if step < 1:
            raise ValueError(f"{key} is {step}")
        return [at if (index + 1) % step == 0 else otherwise for index in range(_needed(count))]

    return read


def _numbered(config: Mapping[str, Any], count: int | None) -> list[str]:
    """MiniMax: 0 is lightning attention, 1 is softmax attention."""
    kinds = {0: "linear_attention", 1: "full_attention"}
    return [kinds.get(value, str(value)) for value in config["attn_type_list"]]


def _kimi(config: Mapping[str, Any], count: int | None) -> list[str]:
    """Kimi's two lists count layers from 1."""
    part = config["linear_attn_config"]
    kinds: list[str | None] = [None] * _needed(count)
    for key, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention")):
        for number in part[key]:
            if not 1 <= number <= len(kinds):
                raise ValueError(f"linear_attn_config.{key} names layer {number} of {count}")
            if kinds[number - 1] not in (None, kind):
                raise ValueError(f"linear_attn_config names layer {number} twice")
            kinds[number - 1] = kind
    if None in kinds:
        raise ValueError(f"linear_attn_config names no kind for layer {kinds.index(None) + 1}")
    return [kind or "" for kind in kinds]


def _kimi_applies(config: Mapping[str, Any]) -> bool:
    part = config.get("linear_attn_config")
    return isinstance(part, Mapping) and "kda_layers" in part and "full_attn_layers" in part


#: In order of precedence.
DIALECTS: tuple[Dialect, ...] = (
    Dialect(("layer_types",), _listed("layer_types"), whole=True),
    Dialect(("layers_block_type",), _listed("layers_block_type"), whole=True),
    Dialect(("hybrid_override_pattern",), _pattern, whole=True),
    Dialect(("attn_type_list",), _numbered, whole=True),
    Dialect(("linear_attn_config",), _kimi, whole=True),
    Dialect(("block_types",), _cyclic),
    Dialect(("attn_layer_indices",), _indices("attn_layer_indices", "full_attention", "linear_attention")),
    Dialect(("full_attn_idxs",), _indices("full_attn_idxs", "full_attention", "conv")),
    Dialect(("hybrid_layer_ids",), _indices("hybrid_layer_ids", "hybrid", "linear_attention")),
    Dialect(("local_layer_ids",), _indices("local_layer_ids", "hybrid_sliding", "hybrid")),
    Dialect(("attn_layer_period", "attn_layer_offset"), _period),
    Dialect(("full_attention_interval",), _every("full_attention_interval", "full_attention", "linear_attention")),
    Dialect(("layer_group_size",), _every("layer_group_size", "full_attention", "linear_attention")),
    Dialect(("sliding_window_pattern",), _every("sliding_window_pattern", "full_attention", "sliding_attention")),
)
#: Model types whose layers are all alike, so that their configs name no sequence.
UNIFORM = {
    "mamba": "linear_attention",
    "falcon_mamba": "linear_attention",
    "mamba2": "linear_attention",
    "rwkv": "linear_attention",
    "xlstm": "linear_attention",
    "falcon_h1": "hybrid",
    "zaya": "hybrid",
}


@dataclass(frozen=True)
class Reading:
    """What a config's fields say about its layers.

    Attributes:
        layouts: one per field that names the sequence, by precedence.
        problems: field and what is wrong with it.
        whole: the fields that write the sequence out.
    """

    layouts: tuple[LayerLayout, ...]
    problems: tuple[tuple[str, str], ...]
    whole: frozenset[str] = frozenset()

    @property
    def layout(self) -> LayerLayout | None:
        return self.layouts[0] if self.layouts else None


def read_config(config: Mapping[str, Any]) -> Reading:
    """The sequences that the fields of a config.json name; nothing is filled in from defaults."""
    part = text_part(config)
    part = part if part.get("model_type") else {**part, "model_type": config.get("model_type")}
    count = layer_count(part)
    layouts, problems, whole = [], [], set()
    for dialect in DIALECTS:
        applies = _kimi_applies(part) if dialect.read is _kimi else dialect.applies(part)
        if not applies:
            continue
        try:
            kinds = dialect.read(part, count)
        except (ValueError, TypeError, KeyError) as error:
            problems.append((dialect.fields[0], str(error)))
            continue
        unknown = sorted({kind for kind in kinds if kind not in KNOWN})
        if unknown:
            problems.append((dialect.fields[0], f"unknown layer types: {', '.join(unknown)}"))
            continue
        layouts.append(LayerLayout(tuple(kinds), dialect.name))
        if dialect.whole:
            whole.add(dialect.name)
    uniform = UNIFORM.get(str(part.get("model_type")))
    if uniform and count is not None and not layouts and not problems:
        layouts.append(LayerLayout((uniform,) * count, f"model_type {part['model_type']}: all layers are alike"))
    return Reading(tuple(layouts), tuple(problems), frozenset(whole))


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


def agree(config: str | None, tensors: str | None) -> bool:
    """Whether a layer type of a config and one that tensor names imply can be the same layer."""
    if config is None or tensors is None or config == tensors:
        return True
    if config in HYBRID and tensors == "hybrid":
        return True
    if {config, tensors} & {"compressed_sparse_attention", "heavily_compressed_attention"}:
        return tensors == "full_attention" and config == "sliding_attention"
    if config in {"dense", "sparse"}:
        return tensors in {"mlp", "moe"}
    # An indexer shows in the names; that it is missing or idle is told by the tensors one by one.
    return config in ATTENTION and tensors in ATTENTION


def first_difference(config: Sequence[str | None], tensors: Sequence[str | None]) -> int | None:
    """The first index where the two cannot be the same layer, or where one of them ends."""
    for index, (theirs, ours) in enumerate(zip(config, tensors, strict=False)):
        if not agree(theirs, ours):
            return index
    return None if len(config) == len(tensors) else min(len(config), len(tensors))
