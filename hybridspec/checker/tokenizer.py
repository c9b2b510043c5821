"""Tokenizers, read from their files: one against its own checkpoint, and two against each other.

Nothing is imported from a checkpoint; tokenizer.json is data for the tokenizers library.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridspec.checkpoints.checkpoint import Checkpoint
from hybridspec.checkpoints.findings import Finding

TOKENIZER = "tokenizer.json"
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


def tokenizer_facts(checkpoint: Checkpoint, files: TokenizerFiles) -> dict[str, Any]:
    """Sizes for the report; padding is the number of embedding rows without a token."""
    size, rows = checkpoint.vocab_size, embedding_rows(checkpoint)
    return {
        "file": files.file if files.raw or files.digest else None,
        "kind": (files.raw["model"].get("type") or kind_of(files)) if files.raw else None,
        "tokens": files.size if files.raw else None,
        "added_tokens": len(files.added) if files.raw else None,
        "vocab_size": size,
        "embedding_rows": rows,
        "padding": (rows or size) - files.largest - 1 if files.raw and (rows or size) else None,
        "stop_ids": sorted(stop_ids(checkpoint)),
        "chat_template": chat_template(checkpoint) is not None,
    }


EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embeddings.weight", "llm.embed.weight", "wte.weight")


def kind_of(files: TokenizerFiles) -> str:
    model = files.raw["model"]
    return "BPE" if model.get("merges") is not None else "Unigram" if isinstance(model.get("vocab"), list) else "other"


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the input embedding, by its header."""
    for name, tensor in checkpoint.weights.tensors.items():
        if name.endswith(EMBEDDINGS) and len(tensor.shape) == 2 and "visual" not in name and ".layers." not in name:
            return tensor.shape[0]
    return None
