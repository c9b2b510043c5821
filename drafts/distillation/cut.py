"""A model of some of another's layers, with that one's embeddings, norm and head."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hybridspec.drafts.distillation.cut_config import cut_config
from hybridspec.drafts.distillation.layer_choice import layer_list, mixer_kinds
from hybridspec.errors import InputError, UnsupportedLayerError

#: Zamba2's shared blocks hold an adapter for each hybrid layer, numbered among these.
ADAPTER = re.compile(r"(?<=adapter_list\.)\d+(?=\.)")


def check_kept(kept: Sequence[int], layers: int) -> list[int]:
    """Raises :class:`InputError` unless ``kept`` is an increasing list of layer numbers."""
    kept = list(kept)
    outside = [layer for layer in kept if not 0 <= layer < layers]
    if outside:
        raise InputError(f"keep layers: the target has layers 0 to {layers - 1}, not {outside[0]}")
    if not kept or kept != sorted(set(kept)):
        raise InputError(f"keep layers: give different layer numbers in rising order, not {kept}")
    return kept


def cut_model(target: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A text model of the layers ``kept`` of ``target``, with copies of all its weights, in its dtype.

    Raises:
        InputError: ``kept`` is not an increasing list of layer numbers.
        UnsupportedLayerError: these layers cannot be a model of their own; names the model type and the reason.
    """
    config = target.config.get_text_config(decoder=True)
    kept = check_kept(kept, config.num_hidden_layers)

    def refuse(reason: object) -> UnsupportedLayerError:
        return UnsupportedLayerError(
            f"{config.model_type}: no draft can be cut of layers {', '.join(map(str, kept))}: {reason}. "
            "Choose others with --keep-layers."
        )

    if (every := getattr(config, "rescale_every", 0)) and config.num_hidden_layers > every:
        raise refuse(f"its weights are scaled by depth every {every} layers (rescale_every)")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedLayerError(
            f"{config.model_type}: transformers has no causal language model of this type alone, so no draft can be cut"
        )
    try:
        smaller = cut_config(config, kept)
        with torch.random.fork_rng():
            draft = AutoModelForCausalLM.from_config(smaller, dtype=target.dtype).eval()
        (ours, new), (theirs, old) = layer_list(draft), layer_list(target)
    except UnsupportedLayerError:
        raise
    except Exception as error:
        raise refuse(f"transformers does not build it ({' '.join(str(error).split())})") from error
    wanted = [mixer_kinds(config)[layer] for layer in kept]
    if mixer_kinds(smaller) != wanted:
        raise refuse(f"its config cannot say {', '.join(wanted)} and gives {', '.join(mixer_kinds(smaller))}")
    for number, layer in enumerate(kept):
        if type(new[number]) is not type(old[layer]):
            raise refuse(
                f"its layer {number} would be a {type(new[number]).__name__}, not a {type(old[layer]).__name__}"
            )
    source = target.state_dict()
    rename = _renaming(ours, theirs, kept, mixer_kinds(config))
    for name, tensor in draft.state_dict().items():
        value = source.get(rename(name))
        if value is None or value.shape != tensor.shape:
            found = "nothing" if value is None else f"a tensor of shape {list(value.shape)}"
            raise refuse(f"the target has {found} for {name} of shape {list(tensor.shape)}")
        tensor.copy_(value)
    draft.tie_weights()
    draft.generation_config = target.generation_config
    return draft


def _renaming(ours: str, theirs: str, kept: Sequence[int], kinds: Sequence[str]) -> Callable[[str], str]:
    """From a tensor's name in the draft, whose layers lie at ``ours``, to that of its source in the target."""
    inside, outside = ours.rpartition(".")[0], theirs.rpartition(".")[0]
    hybrid = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
    adapters = [hybrid.index(layer) for layer in kept if kinds[layer] == "hybrid"]

    def rename(name: str) -> str:
        if name.startswith(f"{ours}."):
            number, _, rest = name.removeprefix(f"{ours}.").partition(".")
            rest = ADAPTER.sub(lambda match: str(adapters[int(match.group())]), rest)
            return f"{theirs}.{kept[int(number)]}.{rest}"
        if inside and name.startswith(f"{inside}."):
            return outside + name.removeprefix(inside)
        return name

    return rename


def shared_parts(draft: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters that a draft has in common with its target: embeddings, head, and the norm between layers and head."""
    path, _ = layer_list(draft)
    return [parameter for name, parameter in draft.named_parameters() if not name.startswith(f"{path}.")]
