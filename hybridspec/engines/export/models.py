"""What export has to know about a target and a draft, read from their folders without a weight."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridspec.checker.check import Part, pair_facts
from hybridspec.checker.layers import PREDICTION_FIELDS, has_prediction_head
from hybridspec.checker.tokenizer_pair import compare_tokenizers
from hybridspec.checkpoints.checkpoint import Checkpoint, read_checkpoint
from hybridspec.checkpoints.config_facts import context_length
from hybridspec.checkpoints.findings import Subject
from hybridspec.checkpoints.layer_kinds import ATTENTION, HYBRID, RECURRENT
from hybridspec.checkpoints.memory import LayerMemory, UnknownLayer, layer_memory
from hybridspec.checkpoints.modeling_files import modeling_files
from hybridspec.engines.support import PairFacts
from hybridspec.errors import ModelLoadError

CONVOLUTION = "short convolution"


@dataclass(frozen=True)
class ExportedModel:
    """A checkpoint, as far as serving settings depend on it.

    Attributes:
        architectures: as config.json names them; () if it does not.
        kinds: kind of each layer, by config or else by tensors.
        mixers: of each layer, by tensors or else as transformers' code for the model type has it.
        layers: what a sequence keeps; None if some layer has no formula, and ``unknown`` says which.
        weights: bytes; None unless all weight files were read.
        heads: prediction heads that config.json announces.
        has_head: tensors of one are in the files.
        linear_head: width of the keys of a linear attention head.
        attention: heads of keys and values, and their width.
        context: longest sequence.
        state_dtype: of recurrent states as vLLM keeps them, which is not always as transformers does; None is the
            model's own.
    """

    path: str
    model_type: str
    architectures: tuple[str, ...]
    kinds: tuple[str | None, ...]
    mixers: tuple[str | None, ...]
    layers: tuple[LayerMemory, ...] | None
    unknown: str
    weights: int | None
    heads: int | None
    has_head: bool
    linear_head: int | None
    attention: tuple[int, int]
    context: int | None
    state_dtype: str | None

    @property
    def attention_layers(self) -> int:
        return sum(kind in ATTENTION | HYBRID for kind in self.kinds)

    @property
    def recurrent_layers(self) -> int:
        return sum(kind in RECURRENT | HYBRID | {"conv"} for kind in self.kinds)


@dataclass(frozen=True)
class ExportedPair:
    target: ExportedModel
    draft: ExportedModel | None
    facts: PairFacts

    @property
    def recurrent_mixers(self) -> frozenset[str]:
        return frozenset(mixer for mixer in self.target.mixers if mixer)


def read_models(target: str | Path, draft: str | Path | None = None) -> ExportedPair:
    """Reads both folders.

    Raises:
        ModelLoadError: a folder or its config.json is missing or broken; says which.
    """
    one = _part(target, "target")
    two = _part(draft, "draft") if draft is not None else None
    same = None
    if two is not None:
        same = compare_tokenizers(one.checkpoint, one.tokenizer, two.checkpoint, two.tokenizer)[0]["same"]
    models = _model(one), _model(two) if two else None
    facts = pair_facts(one, two, same)
    facts = replace(facts, mixers=frozenset(m for m in models[0].mixers if m), head=models[0].has_head)
    if two is not None:
        facts = replace(facts, draft_mixers=frozenset(m for m in models[1].mixers if m))
    return ExportedPair(*models, facts)


def _part(folder: str | Path, subject: Subject) -> Part:
    checkpoint = read_checkpoint(folder, subject)
    if checkpoint.config is None:
        finding = checkpoint.findings[0]
        raise ModelLoadError(f"{folder}: {finding.seen} {finding.action}")
    part = Part(checkpoint, quick=True)
    if not part.kinds:
        seen = next((f.seen for f in part.findings if f.severity == "error"), "its layers are not known")
        raise ModelLoadError(f"{folder}: {seen} hybridspec check {folder} tells more.")
    return part


def _model(part: Part) -> ExportedModel:
    checkpoint = part.checkpoint
    kinds, mixers = tuple(part.kinds), tuple(part.mixers)
    if not any(mixers):
        mixers = _mixers_by_type(checkpoint.model_type, kinds)
    layers, unknown = None, ""
    try:
        layers = tuple(layer_memory(checkpoint, list(kinds), list(mixers)))
    except UnknownLayer as error:
        unknown = str(error)
    announced = checkpoint.raw_setting(*PREDICTION_FIELDS)
    named = (checkpoint.config or {}).get("architectures")
    return ExportedModel(
        str(checkpoint.folder),
        checkpoint.model_type,
        tuple(str(name) for name in named) if isinstance(named, list) else (),
        kinds,
        mixers,
        layers,
        unknown,
        checkpoint.weights.nbytes if checkpoint.weights.whole else None,
        announced if isinstance(announced, int) else None,
        has_prediction_head(checkpoint),
        _whole(checkpoint.setting("linear_key_head_dim")),
        (_whole(checkpoint.setting("num_key_value_heads")) or 0, _whole(checkpoint.setting("head_dim")) or 0),
        context_length(checkpoint),
        _state_dtype(checkpoint, mixers),
    )


def _state_dtype(checkpoint: Checkpoint, mixers: tuple[str | None, ...]) -> str | None:
    """vLLM's default (``mamba_utils.py`` and ``models/config.py`` of 0.32 and 0.33): float32 for Kimi delta attention
    and Nemotron-H, what config.json says for those and Qwen3.5, else the model's own.
    """
    if "Kimi delta attention" in mixers:
        return "float32"
    if checkpoint.model_type.startswith("nemotron_h"):
        return str(checkpoint.raw_setting("mamba_ssm_cache_dtype") or "float32")
    if checkpoint.model_type.startswith("qwen3_5"):
        return checkpoint.raw_setting("mamba_ssm_dtype")
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _mixers_by_type(model_type: str, kinds: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Without tensors: the recurrence that transformers' code for the model type has, in each layer that keeps one."""
    if not any(kind in RECURRENT | HYBRID | {"conv"} for kind in kinds):
        return ()
    file = modeling_files().get(model_type)
    recurrences = file.recurrences if file else ()
    recurrence = recurrences[0] if recurrences else None
    return tuple(
        recurrence if kind in RECURRENT | HYBRID else CONVOLUTION if kind == "conv" else None for kind in kinds
    )
