"""The tensors that a config calls for, compared with those a checkpoint has, without reading or holding a weight.

The model is built on the meta device, and the header's tensors, on the meta device too, go through transformers' own
loading: every renaming, merge and split of a checkpoint's names is then the loader's.
"""

import re
import warnings
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from hybridspec.checkpoints.files import TensorInfo
from hybridspec.checkpoints.tensor_layers import LAYER_NAME, OTHER_PARTS

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
#: Above so many tensors, equal layers are laid in once.
MANY = 4000
#: What quantised checkpoints hold beside or instead of a weight.
PACKED = re.compile(r"\.(qweight|weight_packed|weight_q|blocks|_blocks)$")
SCALES = re.compile(
    r"(\.|_)(scales?|scale_inv|zeros|qzeros|zero_point|g_idx|weight_shape|absmax|quant_map|nested_absmax|"
    r"nested_quant_map|quant_state\..*|input_scale|weight_scale|weight_scale_2|weight_scale_inv|k_scale|v_scale|"
    r"weight_global_scale|input_global_scale|SCB|weight_format|qscale)$"
)


@dataclass(frozen=True)
class TensorComparison:
    """Names are transformers' own.

    Attributes:
        missing: parameters and buffers that no file holds.
        unexpected: tensors for which the model has no place and that transformers does not know to be harmless.
        mismatched: name, shape in the files, shape in the model.
        failed: first target name and message of tensors that could not be merged or split.
        embeddings: names of the input embedding and the output head.
    """

    model_class: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    failed: tuple[tuple[str, str], ...]
    embeddings: tuple[str, ...]


def compare_with_model(config: PreTrainedConfig, tensors: dict[str, TensorInfo], quantised: bool) -> TensorComparison:
    """Lays the headers' tensors into the model of ``config``. With ``quantised`` weights, shapes are not compared.

    Raises:
        Exception: whatever transformers raises for a config that it cannot build.
    """
    with _quietly():
        model = build_on_meta(config)
        twins = find_twins(model, tensors) if len(tensors) > MANY else {}
        content = {}
        for name, tensor in tensors.items():
            if _layer_of(name) in twins:
                continue
            if quantised and SCALES.search(name):
                continue
            name = PACKED.sub(".weight", name) if quantised else name
            content[name] = torch.empty(tensor.shape, dtype=DTYPES.get(tensor.dtype, torch.uint8), device="meta")
        conversions = get_model_conversion_mapping(model)
        for conversion in conversions:
            # Some are so large that transformers converts them on the CPU, where a meta tensor cannot go.
            if getattr(conversion, "force_cpu", False):
                conversion.force_cpu = False
        options = LoadStateDictConfig(
            device_map={"": "meta"}, weight_mapping=conversions, ignore_mismatched_sizes=True, dtype=None
        )
        info, _ = type(model)._load_pretrained_model(model, content, None, options)
        model._adjust_missing_and_unexpected_keys(info)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = {name for name in info.missing_keys - tied if _layer_of(name) not in twins}
    mismatched = {name: (tuple(found), tuple(wanted)) for name, found, wanted in info.mismatched_keys}
    failed = {name: " ".join(str(text).split()) for name, text in info.conversion_errors.items()}
    return TensorComparison(
        type(model).__name__,
        tuple(sorted(_repeat(missing, twins))),
        tuple(sorted(_repeat(info.unexpected_keys, twins))),
        () if quantised else tuple((n, *mismatched[o]) for n, o in sorted(_repeat(mismatched, twins).items())),
        () if quantised else tuple((n, failed[o]) for n, o in sorted(_repeat(failed, twins).items())),
        _embedding_names(model),
    )


def find_twins(model: PreTrainedModel, tensors: dict[str, TensorInfo]) -> dict[int, int]:
    """Layer -> an earlier one that has the same tensors in the files and in the model, so that only one is laid in.

    A mixture of hundreds of experts in tens of layers has a hundred thousand tensors, and few kinds of layers.
    """
    ours = _by_layer({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    theirs = _by_layer({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    if ours.keys() != theirs.keys():
        return {}
    first: dict[tuple, int] = {}
    twins = {}
    for index in sorted(ours):
        earlier = first.setdefault((frozenset(ours[index]), frozenset(theirs[index])), index)
        if earlier != index:
            twins[index] = earlier
    return twins


def _by_layer(shapes: dict[str, tuple[int, ...]]) -> dict[int, set[tuple]]:
    layers: dict[int, set[tuple]] = {}
    for name, shape in shapes.items():
        match = LAYER_NAME.match(name)
        if match and not OTHER_PARTS.search(match["prefix"]):
            layers.setdefault(int(match["index"]), set()).add((match["rest"], shape))
    return layers


def _layer_of(name: str) -> int | None:
    match = LAYER_NAME.match(name)
    return int(match["index"]) if match and not OTHER_PARTS.search(match["prefix"]) else None


def _repeat(names: Iterable[str], twins: dict[int, int]) -> dict[str, str]:
    """The names, and the same names in the layers that were left out -> the name that stands for them."""
    found = {}
    for name in names:
        found[name] = name
        index = _layer_of(name)
        match = LAYER_NAME.match(name)
        for other, earlier in twins.items():
            if earlier == index:
                found[f"{match['prefix']}.{other}.{match['rest']}"] = name
    return found


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The class that a runner would load, without memory."""
    with torch.device("meta"):
        if type(config) in AutoModelForCausalLM._model_mapping:
            return AutoModelForCausalLM.from_config(config)
        return AutoModelForImageTextToText.from_config(config)


def _embedding_names(model: PreTrainedModel) -> tuple[str, ...]:
    modules = {id(m): name for name, m in model.named_modules()}
    found = []
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = modules.get(id(part))
        found.append(f"{name}.weight" if name else "")
    return tuple(found)


@contextmanager
def _quietly():
    """Without the progress bar and the loading report, which would land on the terminal."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
