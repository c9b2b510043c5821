"""What sequences cost: recurrent states, convolution windows, keys and values, and how many fit into a GPU.

Formulas follow the shapes that transformers' caches hold; the tests compare them with real caches, family by family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from hybridspec.checkpoints.checkpoint import Checkpoint
from hybridspec.checkpoints.config_facts import state_dtypes
from hybridspec.checkpoints.layer_kinds import ATTENTION, HYBRID

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "fp8": 1, "int8": 1}
#: Share of a GPU's memory that engines use for weights and caches (vLLM's default).
USABLE = 0.9
GIB = 2**30


@dataclass(frozen=True)
class LayerMemory:
    """What one sequence keeps in one layer.

    Attributes:
        state: shape of the recurrent state; () if there is none.
        windows: shapes of the convolution windows.
        state_dtype, model_dtype: transformers' names.
        kv_values: numbers per token in keys and values (and indexer keys); 0 without attention.
        window: tokens that a sliding attention keeps; None keeps all.
    """

    kind: str
    state: tuple[int, ...] = ()
    windows: tuple[tuple[int, ...], ...] = ()
    state_dtype: str = "float32"
    model_dtype: str = "bfloat16"
    kv_values: int = 0
    window: int | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes per sequence, whatever its length."""
        recurrent = prod(self.state) * BYTES[self.state_dtype] if self.state else 0
        return recurrent + sum(prod(shape) for shape in self.windows) * BYTES[self.model_dtype]

    def kv_bytes(self, length: int, dtype: str | None = None) -> int:
        """Bytes of keys and values of a sequence of ``length`` tokens."""
        kept = length if self.window is None else min(length, self.window)
        return kept * self.kv_values * BYTES[dtype or self.model_dtype]


class UnknownLayer(Exception):
    """No formula for a layer; says which."""


def _gated_delta(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    state = (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    return state, ((2 * keys + values, c.linear_conv_kernel_dim),)


def _kimi_delta(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    heads, width = c.linear_num_heads, c.linear_head_dim
    return (heads, width, width), ((3 * heads * width, c.linear_conv_kernel_dim),)


def _selective_scan(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    width = _first(c, "intermediate_size", alone="expand") or int(_first(c, "mamba_expand") * c.hidden_size)
    states = _first(c, "mamba_d_state", "state_size")
    window = ((width, _first(c, "mamba_d_conv", "conv_kernel")),)
    heads = getattr(c, "n_mamba_heads", 0)
    return ((heads, width // heads, states) if heads else (width, states)), window


def _ssd(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    heads = _first(c, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    width = _first(c, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    groups = _first(c, "mamba_n_groups", "mamba_ngroups", "n_groups")
    states = _first(c, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = _first(c, "mamba_d_conv", "conv_kernel")
    if width == "auto":
        width = int(_first(c, "mamba_expand", "expand") * c.hidden_size) // heads
    return (heads, width, states), ((heads * width + 2 * groups * states, kernel),)


def _lightning(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return (c.num_attention_heads, width, width), ()


def _rg_lru(c: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    width = getattr(c, "lru_width", None) or c.hidden_size
    return (width,), ((width, c.conv1d_width - 1),)


def _first(config: Any, *names: str, alone: str = "") -> Any:
    """The first attribute that is set; with ``alone``, only for configs that have that attribute too."""
    if alone and getattr(config, alone, None) is None:
        return None
    return next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)


#: Mixer (as in :mod:`hybridspec.checkpoints.layer_kinds`) -> shapes of state and windows, from the text config.
STATES: dict[str, Callable[[Any], tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]] = {
    "gated delta rule": _gated_delta,
    "Kimi delta attention": _kimi_delta,
    "selective scan (Mamba-1)": _selective_scan,
    "SSD (Mamba-2)": _ssd,
    "lightning attention": _lightning,
    "RG-LRU": _rg_lru,
}
#: Mixers whose state transformers keeps in the model's type.
IN_MODEL_DTYPE = frozenset({"lightning attention"})


def layer_memory(checkpoint: Checkpoint, kinds: list[str | None], mixers: list[str | None]) -> list[LayerMemory]:
    """One entry per layer.

    Raises:
        UnknownLayer: no formula is known for one of them.
    """
    config = checkpoint.built_text
    if config is None:
        raise UnknownLayer(f"transformers makes no config of model_type {checkpoint.model_type!r} from config.json")
    dtype = str(checkpoint.setting("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = dtype if dtype in BYTES else "bfloat16"
    asked = next(iter(state_dtypes(checkpoint).values()), "float32")
    asked = asked if asked in BYTES else "float32"
    found = []
    for index, kind in enumerate(kinds):
        mixer = mixers[index] if index < len(mixers) else None
        try:
            found.append(_layer(config, kind, mixer, dtype, asked))
        except (AttributeError, TypeError, ZeroDivisionError) as error:
            raise UnknownLayer(f"layer {index} ({kind}, {mixer}): {error}") from error
        except UnknownLayer as error:
            raise UnknownLayer(f"layer {index}: {error}") from error
    return found


def _layer(config: Any, kind: str | None, mixer: str | None, dtype: str, state_dtype: str) -> LayerMemory:
    name = str(kind)
    state, windows = (), ()
    if kind in HYBRID or kind == "linear_attention":
        if mixer not in STATES:
            raise UnknownLayer(f"no formula for {mixer or 'its recurrence'}")
        state, windows = STATES[mixer](config)
        state_dtype = dtype if mixer in IN_MODEL_DTYPE else state_dtype
    elif kind == "conv":
        windows = ((config.hidden_size, getattr(config, "conv_L_cache", None) or 3),)
    elif kind in {"mlp", "moe", "dense", "sparse"}:
        return LayerMemory(name, model_dtype=dtype)
    elif kind not in ATTENTION or kind in {"compressed_sparse_attention", "heavily_compressed_attention"}:
        raise UnknownLayer(f"no formula for {name}")
    values = _kv_values(config, kind) if kind in ATTENTION | HYBRID else 0
    window = None
    if kind in {"sliding_attention", "hybrid_sliding"}:
        window = _first(config, "sliding_window", "attention_window_size", "sliding_window_size")
    return LayerMemory(name, state, windows, state_dtype, dtype, values, window)


def _kv_values(config: Any, kind: str | None) -> int:
    """Numbers per token. Latent attention is counted compressed, as serving engines keep it."""
    rank = getattr(config, "kv_lora_rank", None)
    values = rank + (config.qk_rope_head_dim or 0) if rank else 0
    if not rank:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = _first(config, "attention_head_dim", "head_dim") or config.hidden_size // config.num_attention_heads
        values = 2 * heads * width
    if kind == "indexed_attention":
        values += _first(config, "index_head_dim", "indexer_head_dim") or 0
    return values


def plan(
    target: list[LayerMemory],
    draft: list[LayerMemory] | None,
    *,
    weights: int,
    draft_weights: int,
    k: int,
    length: int,
    gpu_memory: float | None,
) -> dict[str, Any]:
    """Bytes per sequence and, with ``gpu_memory`` (GiB), how many sequences of ``length`` tokens fit.

    ``plain`` keeps one state per recurrent layer; ``slots`` keeps 1 + K, as vLLM does, with windows widened by K.
    """
    state = sum(layer.state_bytes for layer in target)
    windows = sum(prod(shape[:-1]) * BYTES[layer.model_dtype] for layer in target for shape in layer.windows)
    recurrent = sum(prod(layer.state) * BYTES[layer.state_dtype] for layer in target if layer.state)
    slots = recurrent * (1 + k) + (state - recurrent) + windows * k
    kv = sum(layer.kv_bytes(length) for layer in target)
    per_token = sum(layer.kv_values * BYTES[layer.model_dtype] for layer in target if layer.window is None)
    draft_kv = sum(layer.kv_bytes(length) for layer in draft or ())
    draft_state = sum(layer.state_bytes for layer in draft or ())
    result: dict[str, Any] = {
        "layers": _grouped(target),
        "state_bytes": state,
        "state_bytes_with_slots": slots,
        "slot_factor": 1 + k,
        "kv_bytes_per_token": per_token,
        "kv_bytes": kv,
        "draft_bytes": draft_state * (1 + k) + draft_kv,
        "k": k,
        "length": length,
        "crossing_length": -(-slots // per_token) if per_token else None,
        "larger_pool": "states" if slots > kv else "keys and values",
        "weights_bytes": weights,
        "draft_weights_bytes": draft_weights,
        "gpu_memory_bytes": None,
        "sequences": None,
    }
    if gpu_memory is not None:
        usable = int(gpu_memory * GIB * USABLE)
        plain = _fits(usable - weights, state + kv)
        spoken = _fits(usable - weights - draft_weights, slots + kv + result["draft_bytes"])
        result["gpu_memory_bytes"] = int(gpu_memory * GIB)
        result["sequences"] = {"plain": plain, "speculative": spoken}
    return result


def _fits(room: int, each: int) -> int:
    return 0 if room <= 0 else room // each if each else 0


def _grouped(layers: list[LayerMemory]) -> list[dict[str, Any]]:
    """Equal layers counted together, in the order of their first appearance."""
    groups: dict[LayerMemory, int] = {}
    for layer in layers:
        groups[layer] = groups.get(layer, 0) + 1
    return [
        {
            "kind": layer.kind,
            "layers": count,
            "state_shape": list(layer.state),
            "state_dtype": layer.state_dtype if layer.state else None,
            "window_shapes": [list(shape) for shape in layer.windows],
            "window_dtype": layer.model_dtype if layer.windows else None,
            "state_bytes": layer.state_bytes,
            "kv_bytes_per_token": layer.kv_values * BYTES[layer.model_dtype],
            "sliding_window": layer.window,
        }
        for layer, count in groups.items()
    ]
