"""How much memory a sequence's past takes."""

from collections.abc import Iterable

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hybridspec.state.block import Block
from hybridspec.state.layers import KeyValueBuffer


def recurrent_bytes(roots: Iterable[object]) -> int:
    """Bytes of all storages that can be reached and belong to recurrences and convolutions, each counted once.

    Keys and values of attention do not count.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, nn.Module | PreTrainedConfig | KeyValueBuffer | Block | type):
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
