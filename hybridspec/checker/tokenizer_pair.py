"""Two tokenizers against each other, from their files: tables, what they do to texts, and their conversations."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridspec.checker.sample_texts import PROBES
from hybridspec.checker.tokenizer import TOKENIZER, TokenizerFiles, chat_template, kind_of, stop_ids, token_name
from hybridspec.checkpoints.checkpoint import Checkpoint
from hybridspec.checkpoints.findings import Finding

#: Part of tokenizer.json -> code for a difference.
STEPS = {"normalizer": "HS305", "pre_tokenizer": "HS306"}
#: Options of the model inside tokenizer.json, beside its tables.
TABLES = {"vocab", "merges", "type"}


@dataclass(frozen=True)
class ProbeResult:
    """Probes that are encoded differently: name, first position, ids there."""

    name: str
    position: int
    target_ids: list[int]
    draft_ids: list[int]

    def __str__(self) -> str:
        return f"probe {self.name!r} differs from token {self.position} on ({self.target_ids} and {self.draft_ids})"


def compare_tokenizers(
    target: Checkpoint, ours: TokenizerFiles, draft: Checkpoint, theirs: TokenizerFiles
) -> tuple[dict[str, Any], list[Finding]]:
    """Facts for the report, and what differs; a cause is reported, its consequences are not reported again."""
    facts: dict[str, Any] = {"same": None, "probes": len(PROBES), "probes_differing": None}
    if ours.raw is None or theirs.raw is None:
        if ours.digest and ours.digest == theirs.digest:
            facts["same"] = True
        sizes = target.vocab_size, draft.vocab_size
        if facts["same"] or None in sizes or sizes[0] == sizes[1]:
            return facts, []
        seen = f"vocab_size is {sizes[0]} in the target and {sizes[1]} in the draft."
        return facts, [Finding("HS314", "pair", seen, "config.json", "vocab_size")]
    found = _tables(ours, theirs)
    probes: list[ProbeResult] = []
    if ours.digest and ours.digest == theirs.digest:
        facts |= {"same": True, "probes_differing": 0}
    elif ours.encoder is not None and theirs.encoder is not None:
        probes = run_probes(ours, theirs)
        facts["probes_differing"] = len(probes)
    if not any(finding.code in ("HS301", "HS302", "HS303", "HS311") for finding in found):
        found += _steps(ours, theirs, probes)
    same_ids = not found
    if same_ids and probes:
        seen = f"{len(probes)} of {len(PROBES)} probes: {probes[0]}."
        found.append(Finding("HS310", "pair", seen, TOKENIZER))
    if facts["same"] is None:
        facts["same"] = not [finding for finding in found if finding.severity != "note"]
    if target.vocab_size != draft.vocab_size and not any(finding.severity == "error" for finding in found):
        seen = (
            f"vocab_size is {target.vocab_size} in the target and {draft.vocab_size} in the draft; both tokenizers "
            f"have the same {ours.size} tokens."
        )
        found.append(Finding("HS307", "pair", seen, "config.json", "vocab_size"))
    return facts, found


def _tables(ours: TokenizerFiles, theirs: TokenizerFiles) -> list[Finding]:
    kinds = [files.raw["model"].get("type") or kind_of(files) for files in (ours, theirs)]
    if kinds[0] != kinds[1]:
        seen = f"The target's is {kinds[0]}, the draft's {kinds[1]}."
        return [Finding("HS311", "pair", seen, TOKENIZER, "model.type")]
    found = []
    moved = [t for t in ours.vocabulary.keys() & theirs.vocabulary.keys() if ours.vocabulary[t] != theirs.vocabulary[t]]
    alone = ours.vocabulary.keys() ^ theirs.vocabulary.keys()
    # A token may be an added one on one side only: what counts is its id.
    alone = {token for token in alone if ours.id_of(token) != theirs.id_of(token)}
    if alone:
        lost = sorted(token for token in alone if theirs.id_of(token) is None)
        more = sorted(token for token in alone if ours.id_of(token) is None)
        seen = f"{len(lost)} tokens are the target's alone{_first(lost)}, {len(more)} the draft's alone{_first(more)}"
        seen += f"; {len(moved)} of those in both have other ids." if moved else "."
        found.append(Finding("HS302", "pair", seen, TOKENIZER, "model.vocab"))
    elif moved:
        token = min(moved, key=lambda t: ours.vocabulary[t])
        seen = (
            f"{len(moved)} of {len(ours.vocabulary)} tokens have other ids, first {token!r}: "
            f"{ours.vocabulary[token]} in the target, {theirs.vocabulary[token]} in the draft."
        )
        found.append(Finding("HS301", "pair", seen, TOKENIZER, "model.vocab"))
    tokens = {*ours.added, *theirs.added}
    shifted = sorted(t for t in tokens if ours.id_of(t) != theirs.id_of(t))
    if shifted and not found:
        listed = ", ".join(f"{t!r} ({ours.id_of(t)} and {theirs.id_of(t)})" for t in shifted[:3])
        seen = f"{len(shifted)} added tokens have other ids in target and draft: {listed}."
        found.append(Finding("HS303", "pair", seen, TOKENIZER, "added_tokens"))
    return found


def _first(tokens: Sequence[str]) -> str:
    return f" (first {tokens[0]!r})" if tokens else ""


def _steps(ours: TokenizerFiles, theirs: TokenizerFiles, probes: list[ProbeResult]) -> list[Finding]:
    """Differences in how text becomes tokens; a warning where no probe shows a consequence."""
    severity = "error" if probes else "warning"
    effect = f" {len(probes)} of {len(PROBES)} probes are encoded differently, first: {probes[0]}." if probes else ""
    effect = effect or " No probe is encoded differently."
    found = []
    if ours.merges != theirs.merges:
        seen = f"{_merge_difference(ours.merges, theirs.merges)}.{effect}"
        found.append(Finding("HS304", "pair", seen, TOKENIZER, "model.merges", severity))
    # tokenizer.json has all steps; vocab.json has none.
    if ours.encoder is None or theirs.encoder is None:
        return found
    for part, code in STEPS.items():
        a, b = ours.raw.get(part), theirs.raw.get(part)
        if a != b:
            seen = f"{part}: {_json_difference(a, b)}.{effect}"
            found.append(Finding(code, "pair", seen, TOKENIZER, part, severity))
    rest = [part for part in ("post_processor", "decoder") if ours.raw.get(part) != theirs.raw.get(part)]
    options = [{k: v for k, v in f.raw["model"].items() if k not in TABLES} for f in (ours, theirs)]
    rest += [f"model.{key}" for key in sorted({*options[0], *options[1]}) if options[0].get(key) != options[1].get(key)]
    if ours.raw["model"].get("type") == "Unigram" and _scores(ours) != _scores(theirs):
        rest.append("model.vocab (scores)")
    rest += ["added_tokens (flags)"] if _flags(ours) != _flags(theirs) else []
    if rest and not (probes and not found):
        found.append(Finding("HS312", "pair", f"These differ: {', '.join(rest)}.", TOKENIZER, rest[0]))
    return found


def _scores(files: TokenizerFiles) -> list[Any]:
    return [entry[1] for entry in files.raw["model"]["vocab"]]


def _flags(files: TokenizerFiles) -> dict[str, Any]:
    entries = files.raw.get("added_tokens") or []
    return {e["content"]: {k: v for k, v in e.items() if k != "id"} for e in entries}


def _merge_difference(ours: list, theirs: list) -> str:
    missing, more = set(ours) - set(theirs), set(theirs) - set(ours)
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if not missing and not more:
        return f"The {len(ours)} merges are the same in another order, from number {first} on"
    example = next(iter(sorted(missing or more)))
    return (
        f"{len(missing)} merges are the target's alone and {len(more)} the draft's alone, for example "
        f"{' + '.join(example)}; first difference at number {first} of {len(ours)}"
    )


def _json_difference(a: Any, b: Any, path: str = "") -> str:
    """The first place where two JSON values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return _json_difference(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return _json_difference(x, y, f"{path}[{index}]")
    shown = [json.dumps(value, ensure_ascii=False) for value in (a, b)]
    if max(map(len, shown)) > 80:
        start = next(i for i, pair in enumerate(zip(*shown, strict=False)) if pair[0] != pair[1])
        shown = [("..." if start > 20 else "") + text[max(0, start - 20) : start + 50] for text in shown]
    return f"{path + ' is ' if path else ''}{shown[0]} in the target and {shown[1]} in the draft"


def run_probes(ours: TokenizerFiles, theirs: TokenizerFiles) -> list[ProbeResult]:
    """The probes that the two encode differently; the target's own special tokens as text are one of them."""
    texts = PROBES | {"special tokens": " a ".join(list(ours.added)[:200])}
    found = []
    for name, text in texts.items():
        a, b = (files.encoder.encode(text, add_special_tokens=False).ids for files in (ours, theirs))
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append(ProbeResult(name, at, a[at : at + 3], b[at : at + 3]))
    return found


def compare_conversations(target: Checkpoint, draft: Checkpoint) -> list[Finding]:
    """Stop tokens, bos and pad, and chat templates."""
    found = []
    stops = stop_ids(target), stop_ids(draft)
    if stops[0] != stops[1]:
        seen = f"Generation stops at {sorted(stops[0])} in the target and at {sorted(stops[1])} in the draft."
        found.append(Finding("HS308", "pair", seen, "generation_config.json", "eos_token_id"))
    for name in ("bos", "pad"):
        values = [_special(checkpoint, name) for checkpoint in (target, draft)]
        if values[0] != values[1]:
            seen = f"{name}: {values[0]} in the target, {values[1]} in the draft."
            found.append(Finding("HS313", "pair", seen, "config.json", f"{name}_token_id"))
            break
    templates = chat_template(target), chat_template(draft)
    if templates[0] and templates[1] and templates[0] != templates[1]:
        ratio = difflib.SequenceMatcher(None, *(t[:4000] for t in templates), autojunk=False).quick_ratio()
        seen = f"They differ ({ratio:.0%} alike)."
        found.append(Finding("HS309", "pair", seen, "chat_template.jinja", "chat_template"))
    elif templates[0] and not templates[1]:
        seen = "Only the target has one."
        found.append(Finding("HS309", "pair", seen, "chat_template.jinja", "chat_template", "note"))
    return found


def _special(checkpoint: Checkpoint, name: str) -> Any:
    value = checkpoint.generation.get(f"{name}_token_id")
    value = checkpoint.raw_setting(f"{name}_token_id") if value is None else value
    return token_name(checkpoint.tokenizer_config.get(f"{name}_token")) or value
