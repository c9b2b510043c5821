"""A draft against its target: family, context, positions, state types, quantisation and size."""

import re
from typing import Any

from hybridspec.checkpoints.checkpoint import Checkpoint
from hybridspec.checkpoints.config_facts import CONTEXT, context_length, rope, state_dtypes
from hybridspec.checkpoints.findings import Finding
from hybridspec.checkpoints.layer_kinds import compact

FULL_PRECISION = frozenset({"float32", "fp32", "float64", "float", "auto"})
#: A draft above this share of the target's parameters rarely pays.
LARGE_DRAFT = 1 / 3


def check_state_dtype(checkpoint: Checkpoint) -> list[Finding]:
    """A recurrent state that the config asks to keep in half precision."""
    half = {name: value for name, value in state_dtypes(checkpoint).items() if value.lower() not in FULL_PRECISION}
    return [
        Finding("HS401", checkpoint.subject, f"{name} is {value}.", "config.json", name) for name, value in half.items()
    ]


def check_pair(target: Checkpoint, draft: Checkpoint, kinds: tuple[list, list]) -> list[Finding]:
    """Findings about the two together; ``kinds`` are their layer sequences."""
    found = []
    same_family = _family(target) == _family(draft)
    shares = [_mix(sequence) for sequence in kinds]
    if not same_family:
        seen = f"The target is {target.model_type}, the draft {draft.model_type}."
        found.append(Finding("HS403", "pair", seen, "config.json", "model_type"))
    elif shares[0] != shares[1]:
        seen = f"Both are {target.model_type}; the target has {compact(kinds[0])}, the draft {compact(kinds[1])}."
        found.append(Finding("HS403", "pair", seen, "config.json", "layer_types"))
    lengths = context_length(target), context_length(draft)
    if lengths[0] and lengths[1] and lengths[1] < lengths[0]:
        seen = f"The target takes {lengths[0]} tokens, the draft {lengths[1]}."
        found.append(Finding("HS404", "pair", seen, "config.json", CONTEXT[0]))
    if same_family and (difference := _differing(rope(target), rope(draft))):
        found.append(Finding("HS405", "pair", difference, "config.json", "rope_parameters"))
    types = state_dtypes(target), state_dtypes(draft)
    if types[0] and types[1] and set(types[0].values()) != set(types[1].values()):
        seen = f"{types[0]} in the target, {types[1]} in the draft."
        found.append(Finding("HS402", "pair", seen, "config.json", next(iter(types[0]))))
    ties = target.setting("tie_word_embeddings"), draft.setting("tie_word_embeddings")
    if None not in ties and bool(ties[0]) != bool(ties[1]):
        seen = f"{bool(ties[0])} in the target, {bool(ties[1])} in the draft.".lower().capitalize()
        found.append(Finding("HS409", "pair", seen, "config.json", "tie_word_embeddings"))
    return found + _size(target, draft)


def check_quantisation(checkpoint: Checkpoint) -> list[Finding]:
    if checkpoint.quantisation is None:
        return []
    seen = f"quantization_config says {checkpoint.quantisation}."
    return [Finding("HS406", checkpoint.subject, seen, "config.json", "quantization_config")]


def _family(checkpoint: Checkpoint) -> str:
    """Model type without what tells a text part or experts apart."""
    return re.sub(r"(_moe|_text|_vl)+$", "", checkpoint.model_type)


def _mix(kinds: list) -> tuple[float, ...]:
    """Shares of the kinds of layers, roughly."""
    names = sorted(set(map(str, kinds)))
    return tuple((name, round(kinds.count(name) / len(kinds), 1)) for name in names) if kinds else ()


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    texts = [f"{name} is {ours.get(name)} in the target and {theirs.get(name)} in the draft" for name in names]
    return "; ".join(texts[:3]) + "." if texts else ""


def _size(target: Checkpoint, draft: Checkpoint) -> list[Finding]:
    if not (target.weights.whole and draft.weights.whole) or target.quantisation or draft.quantisation:
        return []
    ours, theirs = target.weights.parameters, draft.weights.parameters
    if not ours or not theirs or theirs <= LARGE_DRAFT * ours:
        return []
    seen = f"{theirs:,} parameters of the draft are {theirs / ours:.0%} of the target's {ours:,}."
    return [Finding("HS407", "pair", seen, severity="warning" if theirs > ours else "note")]
