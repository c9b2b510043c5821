"""The whole check of a target and, if there is one, its draft."""

from pathlib import Path
from typing import Any

from hybridspec.checker.layers import announces_prediction_head, check_layers, has_prediction_head, recurrent_kinds
from hybridspec.checker.pair import check_pair, check_quantisation, check_state_dtype
from hybridspec.checker.tokenizer import (
    TokenizerFiles,
    check_tokenizer,
    read_tokenizer,
    tokenizer_facts,
)
from hybridspec.checker.tokenizer_pair import compare_conversations, compare_tokenizers
from hybridspec.checkpoints.checkpoint import Checkpoint, read_checkpoint
from hybridspec.checkpoints.config_facts import context_length, rope, state_dtypes
from hybridspec.checkpoints.findings import Finding, Report
from hybridspec.checkpoints.memory import GIB, UnknownLayer, layer_memory, plan
from hybridspec.engines.support import PairFacts, engine_findings, engines, support
from hybridspec.errors import InputError


def check(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    quick: bool = False,
    k: int = 4,
    length: int = 8192,
    gpu_memory: float | None = None,
    engine: str | None = None,
) -> Report:
    """Checks a checkpoint against its own config, and a draft against its target, from files alone.

    Reads configs, tokenizer files and safetensors headers; no weight, no pickle, no code of a checkpoint.

    Args:
        target, draft: local checkpoint folders.
        quick: leave out what takes more than a moment: the model that transformers would build, memory and engines.
        k: draft length that state slots are counted for.
        length: tokens of a sequence, for memory.
        gpu_memory: GiB; how many sequences fit is reported if given.
        engine: one of :func:`hybridspec.engines.support.engines`: what it does with the pair becomes an error or a
            warning, not a note.

    Raises:
        InputError: an argument is out of range. A broken checkpoint raises nothing: it is in the report.

    Example:
        >>> report = hybridspec.check("Qwen3.5-27B", "Qwen3.5-0.8B")
        >>> [finding.code for finding in report.errors]
    """
    _arguments(k, length, gpu_memory, engine)
    one = Part(read_checkpoint(target, "target"), quick)
    two = Part(read_checkpoint(draft, "draft"), quick) if draft is not None else None
    report = Report(one.facts, two.facts if two else None)
    parts = [part for part in (one, two) if part]
    for part in parts:
        report.add(part.findings)
    readable = all(part.checkpoint.config is not None for part in parts)
    same_tokens = None
    if two and readable:
        facts, findings = compare_tokenizers(one.checkpoint, one.tokenizer, two.checkpoint, two.tokenizer)
        report.draft["tokenizer"]["against_target"] = facts
        same_tokens = facts["same"]
        report.add(findings)
        report.add(compare_conversations(one.checkpoint, two.checkpoint))
        report.add(check_pair(one.checkpoint, two.checkpoint, (one.kinds, two.kinds)))
    if readable and not quick:
        _memory(report, one, two, k, length, gpu_memory)
        rows = support(pair_facts(one, two, same_tokens))
        report.engines = [row.to_dict() for row in rows]
        report.add(engine_findings(rows, engine, two is not None))
    return report


def _arguments(k: int, length: int, gpu_memory: float | None, engine: str | None) -> None:
    if k < 0:
        raise InputError(f"k must be at least 0, not {k}")
    if length < 1:
        raise InputError(f"length must be at least 1 token, not {length}")
    if gpu_memory is not None and not 0 < gpu_memory < 1e6:
        raise InputError(f"gpu_memory must be a number of GiB above 0, not {gpu_memory}")
    if engine is not None and engine not in engines():
        raise InputError(f"unknown engine {engine!r}: choose one of {', '.join(engines())}")


class Part:
    """One checkpoint with everything that is found out about it alone."""

    def __init__(self, checkpoint: Checkpoint, quick: bool) -> None:
        self.checkpoint = checkpoint
        self.findings: list[Finding] = list(checkpoint.findings)
        self.tokenizer = TokenizerFiles()
        self.layers: dict[str, Any] = {}
        self.facts: dict[str, Any] = {"path": str(checkpoint.folder)}
        if checkpoint.config is None:
            return
        self.tokenizer = read_tokenizer(checkpoint)
        self.layers, findings = check_layers(checkpoint, quick)
        self.findings += findings
        self.findings += _without_echo(check_tokenizer(checkpoint, self.tokenizer), self.findings)
        self.findings += check_state_dtype(checkpoint)
        self.findings += check_quantisation(checkpoint)
        weights = checkpoint.weights
        self.facts |= {
            "model_type": checkpoint.model_type,
            "architectures": (checkpoint.config or {}).get("architectures"),
            "layers": self.layers,
            "tokenizer": tokenizer_facts(checkpoint, self.tokenizer),
            "parameters": weights.parameters if weights.whole else None,
            "weights_bytes": weights.nbytes if weights.whole else None,
            "files": len({tensor.file for tensor in weights.tensors.values()}),
            "tensors": len(weights.tensors),
            "context_length": context_length(checkpoint),
            "rope": rope(checkpoint),
            "state_dtypes": state_dtypes(checkpoint),
            "quantisation": checkpoint.quantisation,
            "tie_word_embeddings": checkpoint.setting("tie_word_embeddings"),
            "prediction_head": has_prediction_head(checkpoint),
        }

    @property
    def kinds(self) -> list[str | None]:
        """The config's sequence, or the tensors' where the two differ."""
        config, tensors = self.layers.get("kinds") or [], self.layers.get("tensor_kinds") or []
        return tensors if self.layers.get("first_difference") is not None else config or tensors

    @property
    def mixers(self) -> list[str | None]:
        return self.layers.get("mixers") or []


def _without_echo(findings: list[Finding], earlier: list[Finding]) -> list[Finding]:
    """A wrong vocab_size is one mistake, whether seen from the embedding or from the tokenizer."""
    if any(finding.code == "HS111" for finding in earlier):
        return [finding for finding in findings if finding.code != "HS201"]
    return findings


def _memory(report: Report, one: Part, two: Part | None, k: int, length: int, gpu_memory: float | None) -> None:
    try:
        target = layer_memory(one.checkpoint, one.kinds, one.mixers)
        draft = layer_memory(two.checkpoint, two.kinds, two.mixers) if two else None
    except UnknownLayer as error:
        report.memory = {"unknown": str(error)}
        return
    if not target:
        return
    report.memory = memory = plan(
        target,
        draft,
        weights=one.checkpoint.weights.nbytes,
        draft_weights=two.checkpoint.weights.nbytes if two else 0,
        k=k,
        length=length,
        gpu_memory=gpu_memory,
    )
    if memory["sequences"] is None:
        return
    spent = memory["weights_bytes"] + memory["draft_weights_bytes"]
    plain, spoken = memory["sequences"]["plain"], memory["sequences"]["speculative"]
    if plain == 0:
        seen = f"Weights take {spent / GIB:.1f} GiB of {gpu_memory:g} GiB; no sequence of {length} tokens fits."
        report.add([Finding("HS501", "target", seen)])
    elif spoken == 0:
        seen = f"{plain} sequences of {length} tokens fit without speculation, none with K = {k}."
        report.add([Finding("HS502", "pair" if two else "target", seen)])
    elif memory["larger_pool"] == "states":
        seen = (
            f"States with {1 + k} slots take {memory['state_bytes_with_slots'] / 2**20:.1f} MiB per sequence, keys and "
            f"values of {length} tokens {memory['kv_bytes'] / 2**20:.1f} MiB."
        )
        if memory["crossing_length"]:
            seen += f" From {memory['crossing_length']} tokens on, keys and values are larger."
        report.add([Finding("HS503", "target", seen)])


def pair_facts(one: Part, two: Part | None, same_tokens: bool | None) -> PairFacts:
    def head(part: Part) -> bool:
        return announces_prediction_head(part.checkpoint) and has_prediction_head(part.checkpoint)

    def mixers(part: Part) -> frozenset[str]:
        return frozenset(mixer for mixer in part.mixers if mixer)

    facts = PairFacts(one.checkpoint.model_type, recurrent_kinds(one.kinds), mixers(one), head(one))
    if two is None:
        return facts
    return PairFacts(
        facts.model_type,
        facts.hybrid,
        facts.mixers,
        facts.head,
        two.checkpoint.model_type,
        recurrent_kinds(two.kinds),
        mixers(two),
        head(two),
        (one.checkpoint.vocab_size, two.checkpoint.vocab_size),
        same_tokens,
    )
