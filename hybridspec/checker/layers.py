"""Config against tensors: the layer sequence, the number of layers, and every tensor's presence and shape."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hybridspec.checkpoints.checkpoint import MOST_LAYERS, Checkpoint
from hybridspec.checkpoints.config_layers import Reading, layer_count, read_config, renamed
from hybridspec.checkpoints.findings import Finding
from hybridspec.checkpoints.layer_kinds import ATTENTION, HYBRID, RECURRENT, LayerLayout, first_difference
from hybridspec.checkpoints.tensor_layers import LAYER_NAME

PREDICTION_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers")


def check_layers(checkpoint: Checkpoint, quick: bool = False) -> tuple[dict[str, Any], list[Finding]]:
    """Facts for the report, and findings. ``quick`` leaves out the comparison with transformers' model."""
    subject, findings = checkpoint.subject, []
    count = layer_count(checkpoint.text)
    if count is not None and not 0 < count <= MOST_LAYERS:
        seen = f"num_hidden_layers is {count}."
        return {"count": count}, [Finding("HS105", subject, seen, "config.json", "num_hidden_layers")]
    reading = read_config(checkpoint.config or {})
    findings += _fields(checkpoint, reading, count)
    sequence_broken = bool(findings)
    layout = reading.layout or _default(checkpoint, findings)
    if not sequence_broken and reading.layout:
        findings += (misread := _as_transformers_reads(checkpoint, reading.layout))
        sequence_broken = bool(misread)

    tensors = checkpoint.layers.layout() if checkpoint.layers.names else None
    blamed: set[int] = set()
    difference = None
    if layout and tensors and not sequence_broken and checkpoint.weights.whole:
        blamed, numbers = _counted(checkpoint, len(layout), findings)
        if not numbers:
            difference = first_difference(layout.kinds, tensors.kinds)
        if difference is not None:
            kinds = list(zip(layout.kinds, tensors.kinds, strict=False))
            blamed |= {i for i, (a, b) in enumerate(kinds) if first_difference([a], [b]) is not None}
            findings.append(_differs(checkpoint, layout, tensors, difference, len(blamed), reading))
            findings = [finding for finding in findings if finding.code != "HS102"]
        unknown = [i for i, kind in enumerate(tensors.kinds) if kind is None and i in checkpoint.layers.names]
        if unknown:
            seen = f"{len(unknown)} layers, first {unknown[0]}: none of their tensor names belongs to a known mixer."
            findings.append(Finding("HS109", subject, seen))
    findings += _prediction(checkpoint, count)
    findings += _tied(checkpoint)
    if not checkpoint.built:
        findings += _not_built(checkpoint, sequence_broken)
    elif not quick and not sequence_broken and checkpoint.weights.tensors:
        findings += _tensors(checkpoint, blamed, len(layout) if layout else None)
    facts = {
        "count": len(layout) if layout else count,
        "source": layout.source if layout else None,
        "config": layout.compact if layout else None,
        "tensors": tensors.compact if tensors else None,
        "kinds": list(layout.kinds) if layout else [],
        "tensor_kinds": list(tensors.kinds) if tensors else [],
        "mixers": list(tensors.mixers) if tensors else [],
        "first_difference": difference,
    }
    return facts, findings


def _fields(checkpoint: Checkpoint, reading: Reading, count: int | None) -> list[Finding]:
    """Nonsense in a field, and fields that contradict each other."""
    subject = checkpoint.subject
    found = [Finding("HS105", subject, f"{name}: {text}.", "config.json", name) for name, text in reading.problems]
    whole = [layout for layout in reading.layouts if layout.source in reading.whole]
    for layout in whole[1:]:
        if first_difference(whole[0].kinds, layout.kinds) is not None:
            seen = f"{whole[0].source} says {whole[0].compact}; {layout.source} says {layout.compact}."
            found.append(Finding("HS104", subject, seen, "config.json", layout.source))
            return found
    for layout in whole:
        if count is not None and len(layout) != count:
            seen = f"{layout.source} has {len(layout)} entries; num_hidden_layers is {count}."
            found.append(Finding("HS104", subject, seen, "config.json", layout.source))
            return found
    return found


def _default(checkpoint: Checkpoint, findings: list[Finding]) -> LayerLayout | None:
    """What transformers fills in where no field names the sequence."""
    text = checkpoint.built_text
    if text is None:
        return None
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:
        count = layer_count(checkpoint.text) or getattr(text, "num_hidden_layers", None)
        kind = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
        return LayerLayout((kind,) * count, "attention only") if count else None
    layout = LayerLayout(tuple(renamed(kinds)), f"default of {checkpoint.model_type}")
    if set(layout.kinds) - ATTENTION and not findings:
        seen = f"No field names the layers; transformers' default for {checkpoint.model_type} is {layout.compact}."
        findings.append(Finding("HS102", checkpoint.subject, seen, "config.json", "layer_types"))
    return layout


def _as_transformers_reads(checkpoint: Checkpoint, layout: LayerLayout) -> list[Finding]:
    kinds = getattr(checkpoint.built_text, "layer_types", None)
    if kinds is None:
        return []
    theirs = LayerLayout(tuple(renamed(kinds)), "transformers")
    index = first_difference(layout.kinds, theirs.kinds)
    if index is None:
        return []
    seen = (
        f"{layout.source} says {layout.compact}; transformers builds {theirs.compact} for model_type "
        f"{checkpoint.model_type} (first difference: layer {index})."
    )
    return [Finding("HS116", checkpoint.subject, seen, "config.json", layout.source.split(",")[0])]


def _counted(checkpoint: Checkpoint, count: int, findings: list[Finding]) -> tuple[set[int], bool]:
    """Layers with a wrong number, which nothing else is said about, and whether there are any."""
    present = set(checkpoint.layers.names)
    lost, extra = sorted(set(range(count)) - present), sorted(present - set(range(count)))
    if extra and len(extra) <= (_announced(checkpoint) or 0):
        extra = []
    if not lost and not extra:
        return set(), False
    parts = [f"config.json counts {count} layers, the files hold {len(present)}"]
    parts += [f"layer {lost[0]} has no tensors" if len(lost) == 1 else f"{len(lost)} layers have none"] if lost else []
    parts += [f"layer {extra[0]} is beyond the last"] if extra else []
    seen = "; ".join(parts) + f" ({checkpoint.layers.prefix}.*)."
    findings.append(Finding("HS103", checkpoint.subject, seen, "config.json", "num_hidden_layers"))
    return {*lost, *extra}, True


def _differs(
    checkpoint: Checkpoint, layout: LayerLayout, tensors: LayerLayout, index: int, count: int, reading: Reading
) -> Finding:
    shown = _shown(f"{checkpoint.layers.prefix}.{index}.{name}" for name in checkpoint.layers.names.get(index, ()))
    other = next((o for o in reading.layouts[1:] if first_difference(o.kinds, tensors.kinds) is None), None)
    theirs, ours = ((kinds[index] if index < len(kinds) else "none") for kinds in (layout.kinds, tensors.kinds))
    seen = (
        f"{layout.source} gives {layout.compact}; the tensors give {tensors.compact}. First difference: layer {index}, "
        f"{theirs} against {ours} ({shown}); {count} layers differ."
    )
    if other:
        seen += f" {other.source} agrees with the tensors."
    field = layout.source.split(",")[0] if layout in reading.layouts else "layer_types"
    return Finding("HS101", checkpoint.subject, seen, "config.json", field)


def _shown(names: Iterable[str], most: int = 2) -> str:
    # Those of the mixer say most: the longest paths first.
    ordered = sorted(names, key=lambda name: ("norm" in name, "mlp" in name, name))
    return ", ".join(ordered[:most])


def _announced(checkpoint: Checkpoint) -> int | None:
    value = checkpoint.raw_setting(*PREDICTION_FIELDS)
    nested = (checkpoint.config or {}).get("mtp_config")
    if value is None and isinstance(nested, dict):
        value = nested.get("num_nextn_predict_layers")
    return value if isinstance(value, int) else None


def has_prediction_head(checkpoint: Checkpoint) -> bool:
    """The files hold tensors of a multi-token-prediction head."""
    count = layer_count(checkpoint.text)
    later = count is not None and any(index >= count for index in checkpoint.layers.names)
    return bool(checkpoint.layers.prediction_names) or (later and bool(_announced(checkpoint)))


def announces_prediction_head(checkpoint: Checkpoint) -> bool:
    return bool(_announced(checkpoint))


def _prediction(checkpoint: Checkpoint, count: int | None) -> list[Finding]:
    announced, present = _announced(checkpoint), has_prediction_head(checkpoint)
    field = next((f for f in PREDICTION_FIELDS if checkpoint.raw_setting(f) is not None), PREDICTION_FIELDS[0])
    if announced and not present and checkpoint.weights.whole and checkpoint.weights.tensors:
        seen = f"{field} is {announced}; no tensor of a prediction head is in the files."
        return [Finding("HS113", checkpoint.subject, seen, "config.json", field)]
    if present and not announced:
        names = checkpoint.layers.prediction_names
        seen = f"{len(names)} tensors of a prediction head ({min(names)}); config.json does not announce it."
        return [Finding("HS114", checkpoint.subject, seen, "config.json", field)]
    return []


def _tied(checkpoint: Checkpoint) -> list[Finding]:
    head = next((name for name in checkpoint.weights.tensors if name.endswith("lm_head.weight")), None)
    if head and checkpoint.setting("tie_word_embeddings"):
        seen = f"tie_word_embeddings is true, and {head} is in {checkpoint.weights.tensors[head].file}."
        file = "config.json"
        return [Finding("HS112", checkpoint.subject, seen, file, "tie_word_embeddings", "note")]
    return []


def _not_built(checkpoint: Checkpoint, sequence_broken: bool) -> list[Finding]:
    subject, config = checkpoint.subject, checkpoint.config or {}
    if checkpoint.build_error:
        if sequence_broken:
            return []
        return [Finding("HS115", subject, checkpoint.build_error[:400], "config.json")]
    from transformers import __version__

    kind = config.get("model_type")
    own = " The checkpoint's own code (auto_map) was not run." if config.get("auto_map") else ""
    seen = f"model_type is {kind!r}, which transformers {__version__} does not have.{own}"
    return [Finding("HS110", subject, seen, "config.json", "model_type")]


def _tensors(checkpoint: Checkpoint, blamed: set[int], count: int | None) -> list[Finding]:
    """Missing, unused and misshapen tensors, those of layers that are blamed already left out."""
    from transformers import __version__

    from hybridspec.checker.expected import compare_with_model

    subject = checkpoint.subject
    try:
        result = compare_with_model(checkpoint.built, checkpoint.weights.tensors, bool(checkpoint.quantisation))
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return [Finding("HS117", subject, f"transformers {__version__} cannot lay it out: {text}", "config.json")]

    def counts(name: str) -> bool:
        if ".mtp." in f".{name}" or name in checkpoint.layers.prediction_names:
            return False
        index = _layer_of(name)
        return index is None or (index not in blamed and (count is None or index < count))

    embedding, head = result.embeddings
    found = []
    missing = [name for name in result.missing if counts(name)] if checkpoint.weights.whole else []
    if head in missing:
        missing.remove(head)
        seen = f"tie_word_embeddings is false, and {head} is in no file."
        found.append(Finding("HS112", subject, seen, "config.json", "tie_word_embeddings"))
    failed = [(name, text) for name, text in result.failed if counts(name)]
    broken = {name for name, _ in failed}
    mismatched = [entry for entry in result.mismatched if counts(entry[0])]
    rows = [(name, a, b) for name, a, b in mismatched if name in (embedding, head) and a[1:] == b[1:]]
    if rows:
        name, theirs, ours = rows[0]
        seen = f"vocab_size is {ours[0]}; {name} has {theirs[0]} rows."
        found.append(Finding("HS111", subject, seen, "config.json", "vocab_size"))
    # What is missing from a stack or a merge shows as a smaller one; the layer's peers tell the name in the files.
    stacks = [name for name, a, b in mismatched if len(a) == len(b) == 3 and a[1:] == b[1:] and a[0] < b[0]]
    lost = _lost(checkpoint, [*stacks, *broken]) if checkpoint.weights.whole else []
    unused = [name for name in result.unexpected if counts(name)]
    if missing or failed or lost:
        told = {_layer_of(name) for name in lost}
        missing = [name for name in missing if _layer_of(name) not in told]
        names = [*lost, *missing] or [f"{name} ({text})" for name, text in failed]
        seen = f"{_tensors_are(len(names))} missing, first {', '.join(names[:3])}."
        # A renamed tensor is missing under one name and has no place under the other.
        if unused and {_layer_of(name) for name in unused} <= {_layer_of(name) for name in missing}:
            seen += f" Without a place, so perhaps renamed: {', '.join(unused[:3])}."
            unused = []
        found.append(Finding("HS106", subject, seen, "model.safetensors", names[0]))
        mismatched = [entry for entry in mismatched if _layer_of(entry[0]) not in told]
    shapes = [entry for entry in mismatched if entry not in rows and entry[0] not in broken]
    if shapes:
        name, theirs, ours = shapes[0]
        more = f", and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        seen = f"{name} has shape {list(theirs)} in the files and {list(ours)} by config.json{more}."
        found.append(Finding("HS108", subject, seen, "config.json", name))
    if unused:
        seen = f"{_tensors_are(len(unused))} without a place in {result.model_class}, first {', '.join(unused[:3])}."
        found.append(Finding("HS107", subject, seen, "model.safetensors", unused[0]))
    return found


def _tensors_are(count: int) -> str:
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def _layer_of(name: str) -> int | None:
    match = LAYER_NAME.match(name)
    return int(match["index"]) if match else None


def _lost(checkpoint: Checkpoint, incomplete: list[str]) -> list[str]:
    """Names in the files' own spelling that a layer lacks although all others with its mixer have them; only for the
    layers of ``incomplete`` merges, and of experts only where those are.
    """
    layers, layout = checkpoint.layers, checkpoint.layers.layout()
    wanted = {(_layer_of(name), "experts" in name) for name in incomplete}
    lost = []
    for kind in set(layout.kinds) - {None}:
        peers = [index for index in layers.names if layout.kinds[index] == kind]
        tally = Counter(name for index in peers for name in layers.names[index])
        common = {name for name, times in tally.items() if len(peers) > 2 and times == len(peers) - 1}
        lost += [
            f"{layers.prefix}.{index}.{name}"
            for index in peers
            for name in sorted(common - layers.names[index])
            if (index, "experts" in name) in wanted
        ]
    return lost


def recurrent_kinds(kinds: Iterable[str | None]) -> bool:
    """Some layer keeps a recurrent state or a convolution window."""
    return any(kind in RECURRENT | HYBRID | {"conv"} for kind in kinds)
