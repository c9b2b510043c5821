"""Bytes that a sequence holds: recurrent states, convolution windows, tape; keys and values are left out."""

from collections.abc import Iterable

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hybridspec.layers import KeyValueBuffer, RecurrentLayer
from hybridspec.session import Session


def held_bytes(roots: Iterable[object]) -> int:
    """Bytes of all storages that can be reached and belong to recurrences and convolutions, each counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | PreTrainedConfig | KeyValueBuffer | type):
            continue
        if isinstance(item, CacheLayerMixin) and not hasattr(item, "conv_states"):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            continue
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
        todo += getattr(item, "__dict__", {}).values()
    return sum(storages.values())


def plane_bytes(session: Session) -> tuple[int, int]:
    """Bytes of the recurrent states and of the convolution windows at a committed position: what decoding needs."""
    layers = [layer for layer in session.cache.layers if isinstance(layer, RecurrentLayer)]
    states = [layer.recurrent_states.get(0) for layer in layers]
    windows = [window for layer in layers for window in layer.conv_states.values()]
    state, window = ([x for x in tensors if x is not None] for tensors in (states, windows))
    return sum(x.nbytes for x in state), sum(x.nbytes for x in window)
