"""Which of the target's layers a small draft is made of."""

from collections.abc import Hashable, Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybridspec.errors import InputError, UnsupportedLayerError


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder's layers.

    Raises:
        UnsupportedLayerError: the model does not keep its layers in one list.
    """
    config = model.config.get_text_config(decoder=True)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers and "vis" not in name:
            return name, module
    raise UnsupportedLayerError(
        f"{config.model_type}: {type(model).__name__} has no list of its {config.num_hidden_layers} layers, so no "
        "draft can be cut from it"
    )


def mixer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer in the config's own words; dense models without such a list get one kind."""
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["layer"] * config.num_hidden_layers


def layer_kinds(model: PreTrainedModel) -> list[tuple[str, Hashable]]:
    """(kind of mixer, shapes of all tensors) of each layer: equal ones can stand for each other."""
    _, layers = layer_list(model)
    kinds = mixer_kinds(model.config.get_text_config(decoder=True))
    shapes = [tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers]
    return list(zip(kinds, shapes, strict=True))


def default_count(kinds: Sequence[tuple[str, Hashable]]) -> int:
    """A twelfth of the target's layers, but two, and one of each kind of mixer, where it has more: a draft must be
    cheap first.
    """
    return max(1, min(len(kinds) - 1, max(2, len({mixer for mixer, _ in kinds}), round(len(kinds) / 12))))


def choose_layers(kinds: Sequence[tuple[str, Hashable]], count: int) -> list[int]:
    """``count`` layers spread over the target, whose kinds in a row are a stretch of the target's own pattern.

    Of [L L L F] * 6, two layers are L F and four are L L L F. The first and the last layer are among them where the
    pattern lets them.

    Raises:
        InputError: ``count`` is not between 1 and the number of layers.
    """
    if not 1 <= count <= len(kinds):
        raise InputError(
            f"a draft of {count} layers cannot be cut from a target of {len(kinds)}: choose 1 to {len(kinds)}"
        )
    stretch = _typical_stretch(kinds, count)
    last = len(kinds) - 1
    wanted = [position * last / max(1, count - 1) for position in range(count)]
    # best[i]: cost and layers of the cheapest choice so far that ends with layer i.
    best: dict[int, tuple[float, list[int]]] = {-1: (0.0, [])}
    for position, kind in enumerate(stretch):
        following = {}
        for layer, own in enumerate(kinds):
            before = [entry for end, entry in best.items() if end < layer]
            if own == kind and before:
                cost, layers = min(before)
                following[layer] = (cost + abs(layer - wanted[position]), [*layers, layer])
        best = following
    return min(best.values())[1]


def _typical_stretch(kinds: Sequence[tuple[str, Hashable]], count: int) -> Sequence[tuple[str, Hashable]]:
    """The stretch of ``count`` layers that has most kinds of mixers, has each about as often as the whole target, and
    begins and ends as the target does.
    """
    mixers = [mixer for mixer, _ in kinds]

    def unlike(start: int) -> tuple:
        part = mixers[start : start + count]
        excess = sum(abs(part.count(m) - count * mixers.count(m) / len(mixers)) for m in set(mixers))
        return -len(set(part)), round(excess, 6), (part[0] != mixers[0]) + (part[-1] != mixers[-1]), start

    start = min(range(len(kinds) - count + 1), key=unlike)
    return kinds[start : start + count]
