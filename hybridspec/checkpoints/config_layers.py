"""The layer sequence that the fields of a config.json name, in any of the dialects in use."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridspec.checkpoints.layer_kinds import KNOWN, LayerLayout

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


#: Letters of NVIDIA's patterns.
PATTERN_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


#: Where a composite config keeps the part that generates text.
TEXT_KEYS = ("text_config", "language_config", "llm_config", "language_model", "decoder")


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
