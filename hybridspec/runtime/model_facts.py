"""What a transformers model is like, as far as its rollback goes: read off its modules and its signature."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig

from hybridspec.errors import UnsupportedLayerError
from hybridspec.hooks import adapters
from hybridspec.state.cache import RollbackCache
from hybridspec.state.layers import RecurrentLayer

UNLIMITED = (0.0, float("inf"))


def clamps_steps(model: nn.Module) -> bool:
    """Whether the many-token path clamps time steps; the one-token path never does."""
    return any(tuple(getattr(m, "time_step_limit", None) or UNLIMITED) != UNLIMITED for m in model.modules())


def check_tape(model: nn.Module, config: PreTrainedConfig) -> None:
    """Wraps the recurrences of ``model``.

    Raises:
        UnsupportedLayerError: a layer keeps its past in a way that is not known here; names its index and class.
    """
    cache = RollbackCache(config)
    modules = adapters.attach(model)
    if not getattr(model, "_is_stateful", False):
        return
    layers = decoder_layers(model, len(cache.layers))
    for index, (kept, layer) in enumerate(zip(cache.layers, layers, strict=False)):
        # A stateful model without a recurrent cache layer keeps its state elsewhere.
        suspect = isinstance(kept, RecurrentLayer) or not cache.recurrent
        if suspect and not any(type(m).__module__ in modules for m in layer.modules()):
            raise UnsupportedLayerError(
                f"layer {index} ({type(layer).__name__} of {config.model_type!r}) has a recurrence that is not known "
                "here, so its tokens cannot be taken back. Use rollback='recompute'."
            )


def decoder_layers(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """The ``count`` layers that the decoder runs one after the other; none if it has no such list."""
    return next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), ())
