"""Tokenizers, read from their files: one against its own checkpoint, and two against each other.

Nothing is imported from a checkpoint; tokenizer.json is data for the tokenizers library.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridspec.checker.sample_texts import PROBES
from hybridspec.checkpoints.checkpoint import Checkpoint
from hybridspec.checkpoints.findings import Finding

TOKENIZER = "tokenizer.json"
#: Options of the model inside tokenizer.json, beside its tables.
TABLES = {"vocab", "merges", "type"}
SPECIAL = ("bos", "eos", "pad")


@dataclass
class TokenizerFiles:
    """What was read of a tokenizer.

    Attributes:
        raw: tokenizer.json, or the same form made of vocab.json and merges.txt; None if neither can be read.
        encoder: the tokenizers library's object; None for vocab.json, whose other steps are not in a file.
        vocabulary: token -> id without the added tokens.
        added: added token -> id.
        file: the file that the tables come from.
    """

    raw: dict[str, Any] | None = None
    encoder: Any = None
    vocabulary: dict[str, int] = field(default_factory=dict)
    added: dict[str, int] = field(default_factory=dict)
    file: str = TOKENIZER
    digest: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Different token ids."""
        return len({*self.vocabulary.values(), *self.added.values()})

    @property
    def largest(self) -> int:
        return max((*self.vocabulary.values(), *self.added.values()), default=-1)

    def id_of(self, token: str) -> int | None:
        return self.added.get(token, self.vocabulary.get(token))

    @property
    def merges(self) -> list[tuple[str, str]]:
        entries = (self.raw or {}).get("model", {}).get("merges") or []
        return [tuple(entry.split(" ", 1)) if isinstance(entry, str) else tuple(entry) for entry in entries]


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """Reads the tokenizer of a checkpoint whose config was read; what is wrong becomes a finding."""
    files = TokenizerFiles()
    folder, subject = checkpoint.folder, checkpoint.subject
    if checkpoint.tokenizer_config.get("auto_map"):
        named = json.dumps(checkpoint.tokenizer_config["auto_map"])[:100]
        files.findings.append(
            Finding("HS012", subject, f"auto_map names {named}.", "tokenizer_config.json", "auto_map")
        )
    path = folder / TOKENIZER
    try:
        if path.is_file():
            data = path.read_bytes()
            files.digest = hashlib.sha256(data).hexdigest()
            files.raw = json.loads(data)
            files.encoder = _encoder(data.decode("utf-8"))
        elif (folder / "vocab.json").is_file():
            _from_tables(files, checkpoint)
        else:
            _without_tables(files, checkpoint)
            return files
        _fill(files)
    except Exception as error:
        name = files.file
        files.raw = files.encoder = None
        text = " ".join(str(error).split())[:300]
        files.findings.append(Finding("HS011", subject, f"{name}: {text}", name))
    return files


def _encoder(text: str) -> Any:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(text)
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _fill(files: TokenizerFiles) -> None:
    raw = files.raw
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise ValueError("it has no model")
    table = raw["model"].get("vocab") or {}
    entries = enumerate(table) if isinstance(table, list) else None
    vocabulary = {str(e[0]): i for i, e in entries} if entries is not None else dict(table)
    if not all(type(i) is int and i >= 0 for i in vocabulary.values()):
        raise ValueError("its vocabulary has ids that are no numbers")
    files.added = {str(entry["content"]): int(entry["id"]) for entry in raw.get("added_tokens") or []}
    seen: dict[int, str] = {}
    for token, index in vocabulary.items():
        if index in seen:
            raise ValueError(f"{seen[index]!r} and {token!r} share id {index}")
        seen[index] = token
    clash = next((t for t, i in files.added.items() if seen.get(i, t) != t), None)
    if clash is not None:
        raise ValueError(f"added token {clash!r} has the id of {seen[files.added[clash]]!r}")
    files.vocabulary = {token: index for token, index in vocabulary.items() if token not in files.added}


def _from_tables(files: TokenizerFiles, checkpoint: Checkpoint) -> None:
    """vocab.json and merges.txt; added tokens stand in added_tokens.json or tokenizer_config.json then."""
    files.file, folder = "vocab.json", checkpoint.folder
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = folder / "merges.txt"
    lines = merges.read_text(encoding="utf-8").splitlines() if merges.is_file() else []
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    path = folder / "added_tokens.json"
    added = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for index, entry in (checkpoint.tokenizer_config.get("added_tokens_decoder") or {}).items():
        added[token_name(entry)] = int(index)
    listed = [{"content": token, "id": index} for token, index in added.items()]
    files.raw = {"added_tokens": listed, "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs}}


def _without_tables(files: TokenizerFiles, checkpoint: Checkpoint) -> None:
    model = next((p for p in map(checkpoint.folder.joinpath, ("tokenizer.model", "spiece.model")) if p.is_file()), None)
    if model:
        files.file = model.name
        files.digest = hashlib.sha256(model.read_bytes()).hexdigest()
        seen = f"Only {model.name}, without {TOKENIZER}."
    else:
        seen = f"The folder has no {TOKENIZER}, vocab.json or tokenizer.model."
    files.findings.append(Finding("HS010", checkpoint.subject, seen, TOKENIZER))


def stop_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """End-of-sequence ids: those of generation_config.json, else of config.json."""
    value = checkpoint.generation.get("eos_token_id")
    value = checkpoint.raw_setting("eos_token_id") if value is None else value
    return frozenset(x for x in (value if isinstance(value, list) else [value]) if type(x) is int)


def check_tokenizer(checkpoint: Checkpoint, files: TokenizerFiles) -> list[Finding]:
    """One tokenizer against its own checkpoint."""
    found = list(files.findings)
    if files.raw is None:
        return found
    subject, size = checkpoint.subject, checkpoint.vocab_size
    if size is not None and files.largest >= size:
        over = sorted((i, t) for t, i in {**files.vocabulary, **files.added}.items() if i >= size)
        seen = f"vocab_size is {size}; {len(over)} tokens have ids from {over[0][0]} ({over[0][1]!r}) on."
        found.append(Finding("HS201", subject, seen, files.file, over[0][1]))
    found += _special_ids(checkpoint, files)
    found += _listed_twice(checkpoint, files)
    truncation = files.raw.get("truncation")
    if isinstance(truncation, dict):
        seen = f"truncation is on: at most {truncation.get('max_length')} tokens are kept."
        found.append(Finding("HS205", subject, seen, files.file, "truncation"))
    return found


def _special_ids(checkpoint: Checkpoint, files: TokenizerFiles) -> list[Finding]:
    known = {*files.vocabulary.values(), *files.added.values()}
    config = {**(checkpoint.config or {}), **checkpoint.text}
    for file, content in (("config.json", config), ("generation_config.json", checkpoint.generation)):
        for name in SPECIAL:
            value = content.get(f"{name}_token_id")
            for index in value if isinstance(value, list) else [value]:
                # Some configs write -1 for a token that does not exist.
                if type(index) is int and index not in known and not (index == -1 and name != "eos"):
                    seen = f"{name}_token_id is {value}; {index} is no id of the tokenizer ({files.size} tokens)."
                    severity = "error" if name == "eos" else "warning"
                    return [Finding("HS202", checkpoint.subject, seen, file, f"{name}_token_id", severity)]
    token = token_name(checkpoint.tokenizer_config.get("eos_token"))
    index = files.id_of(token) if token else None
    stops = stop_ids(checkpoint)
    if stops and index is not None and index not in stops:
        seen = f"eos_token is {token!r} with id {index}; generation stops at {sorted(stops)}."
        return [Finding("HS203", checkpoint.subject, seen, "generation_config.json", "eos_token_id")]
    return []


def token_name(value: Any) -> str | None:
    """The text of a special token, which tokenizer_config.json writes as a string or an object."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _listed_twice(checkpoint: Checkpoint, files: TokenizerFiles) -> list[Finding]:
    listed = checkpoint.tokenizer_config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return []
    for key, entry in listed.items():
        token = token_name(entry)
        if token is None or not str(key).isdigit():
            continue
        ours = files.id_of(token)
        if ours is not None and ours != int(key):
            seen = f"{token!r} has id {key} in tokenizer_config.json and {ours} in {files.file}."
            return [Finding("HS204", checkpoint.subject, seen, "tokenizer_config.json", "added_tokens_decoder")]
    return []


# Two tokenizers


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
    kinds = [files.raw["model"].get("type") or _kind(files) for files in (ours, theirs)]
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


def _kind(files: TokenizerFiles) -> str:
    model = files.raw["model"]
    return "BPE" if model.get("merges") is not None else "Unigram" if isinstance(model.get("vocab"), list) else "other"


#: Part of tokenizer.json -> code for a difference.
STEPS = {"normalizer": "HS305", "pre_tokenizer": "HS306"}


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


# Chat templates and special tokens of a pair


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The template as text: a file of its own, or a field of tokenizer_config.json."""
    path = checkpoint.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace").strip()
    value = checkpoint.tokenizer_config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default") or next(iter(named.values()), None)
    return value.strip() if isinstance(value, str) else None


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


def tokenizer_facts(checkpoint: Checkpoint, files: TokenizerFiles) -> dict[str, Any]:
    """Sizes for the report; padding is the number of embedding rows without a token."""
    size, rows = checkpoint.vocab_size, embedding_rows(checkpoint)
    return {
        "file": files.file if files.raw or files.digest else None,
        "kind": (files.raw["model"].get("type") or _kind(files)) if files.raw else None,
        "tokens": files.size if files.raw else None,
        "added_tokens": len(files.added) if files.raw else None,
        "vocab_size": size,
        "embedding_rows": rows,
        "padding": (rows or size) - files.largest - 1 if files.raw and (rows or size) else None,
        "stop_ids": sorted(stop_ids(checkpoint)),
        "chat_template": chat_template(checkpoint) is not None,
    }


EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embeddings.weight", "llm.embed.weight", "wte.weight")


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the input embedding, by its header."""
    for name, tensor in checkpoint.weights.tensors.items():
        if name.endswith(EMBEDDINGS) and len(tensor.shape) == 2 and "visual" not in name and ".layers." not in name:
            return tensor.shape[0]
    return None
