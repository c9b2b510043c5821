"""vLLM's settings for a way of drafting: ``--speculative-config``, the whole command line, and keyword arguments."""

import difflib
import json
import pprint
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hybridspec.engines.export.draft_method import PLAIN, DraftMethod
from hybridspec.engines.export.key_sets import KeySet
from hybridspec.engines.export.memory import MemoryAdvice, advise, amount
from hybridspec.engines.export.models import ExportedPair
from hybridspec.engines.export.refusals import (
    GATED_DELTA,
    V1_ONLY,
    Device,
    Refusal,
    Runner,
    Serving,
    in_one_group,
    refuse,
)
from hybridspec.errors import InputError

#: vLLM's default of ``max_num_seqs`` where advice from memory need not say more.
MOST_SEQUENCES = 256
#: Tokens of a sequence that memory is counted for where nothing else is said.
LENGTH = 8192
#: Methods for which vLLM changes K with the batch (``_maybe_disable_dynamic_sd_for_v1`` of 0.33).
BY_BATCH = ("ngram", "mtp", "draft_model")
OURS = ("model", "speculative_config")
#: The recurrence of the hybrids whose attention is latent.
LATENT = "Kimi delta attention"


@dataclass(frozen=True)
class ExportOptions:
    """Where and how to serve.

    Attributes:
        engine: further engine arguments by vLLM's names.
        runner: None takes vLLM's own choice: V1 on a CPU and for the methods that need it, else V2.
        prefix_caching: None leaves it off where it is unsafe with speculation.
        length: tokens of a sequence, for memory.
        gpu_memory: GiB of one GPU.
        by_concurrency: ``(requests at a time, K)``.
        acceptance: predicted share of steps in which each position is accepted; for ``synthetic``.
        acceptance_length: predicted tokens per step, where the curve is not known.
        synthetic: accept by that curve instead of by the models, to measure its speed.
    """

    keys: KeySet
    device: Device = "gpu"
    runner: Runner | None = None
    prefix_caching: bool | None = None
    engine: Mapping[str, object] = field(default_factory=dict)
    length: int | None = None
    gpu_memory: float | None = None
    by_concurrency: Sequence[tuple[int, int]] = ()
    acceptance: Sequence[float] = ()
    acceptance_length: float | None = None
    synthetic: bool = False

    def __post_init__(self) -> None:
        if self.gpu_memory is not None and not 0 < self.gpu_memory < 1e6:
            raise InputError(f"gpu_memory must be a number of GiB above 0, not {self.gpu_memory}")
        if self.length is not None and self.length < 1:
            raise InputError(f"a sequence must have at least 1 token, not {self.length}")
        if any(not 0 <= rate <= 1 for rate in self.acceptance):
            raise InputError(f"acceptance must lie between 0 and 1, not {list(self.acceptance)}")
        for name in self.engine:
            if name in OURS:
                raise InputError(f"engine argument {name} is what the export writes: leave it out")
            if name not in self.keys.engine_arguments:
                near = difflib.get_close_matches(name, self.keys.engine_arguments, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise InputError(f"{self.keys.name} has no engine argument {name!r}.{hint}")

    def whole(self, name: str) -> int | None:
        """An engine argument that is a number."""
        value = self.engine.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"engine argument {name} must be a whole number of at least 1, not {value!r}")
        return value


@dataclass(frozen=True)
class Export:
    """Settings that vLLM accepts and serves rightly; ``notes`` say what to know about them.

    Attributes:
        speculative_config: None is plain decoding.
        engine_arguments: without the model and the two configs.
    """

    version: str
    target: str
    speculative_config: dict[str, Any] | None
    additional_config: dict[str, Any] | None
    environment: dict[str, str]
    engine_arguments: dict[str, Any]
    notes: tuple[str, ...]
    memory: MemoryAdvice | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM`` and of ``EngineArgs``."""
        found: dict[str, Any] = {"model": self.target, **self.engine_arguments}
        if self.speculative_config is not None:
            found["speculative_config"] = self.speculative_config
        if self.additional_config is not None:
            found["additional_config"] = self.additional_config
        return found

    @property
    def command(self) -> str:
        """One line for a POSIX shell."""
        words = ["vllm", "serve", self.target]
        for name, value in self.arguments.items():
            if name != "model":
                words += flag(name, value)
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, *map(shlex.quote, words)])

    @property
    def python(self) -> str:
        """A program that builds the engine."""
        lines = []
        if self.environment:
            lines += ["import os", ""]
            lines += [f"os.environ[{name!r}] = {value!r}" for name, value in self.environment.items()]
        lines += ["from vllm import LLM", "", "llm = LLM("]
        for name, value in self.arguments.items():
            text = pprint.pformat(value, width=100, sort_dicts=False).replace("\n", "\n    " + " " * (len(name) + 1))
            lines.append(f"    {name}={text},")
        return "\n".join([*lines, ")"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "target": self.target,
            "speculative_config": self.speculative_config,
            "additional_config": self.additional_config,
            "environment": self.environment,
            "engine_arguments": self.engine_arguments,
            "arguments": self.arguments,
            "command": self.command,
            "python": self.python,
            "notes": list(self.notes),
            "memory": self.memory.to_dict() if self.memory else None,
        }


def flag(name: str, value: object) -> list[str]:
    """An engine argument as ``vllm serve`` reads it."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, Mapping):
        return [f"--{option}", json.dumps(value, ensure_ascii=False)]
    if isinstance(value, list | tuple):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}", str(value)]


def export_vllm(models: ExportedPair, proposal: DraftMethod, options: ExportOptions) -> Export | Refusal:
    """Settings for ``proposal``, or why vLLM must not be given any."""
    keys, target = options.keys, models.target
    notes = list(proposal.notes)
    table = _table(proposal, options, notes)
    if table is not None:
        most = max(k for _, _, k in table)
        proposal = replace(proposal, k=most) if most else PLAIN
    engine, prefix_caching = _engine(models, proposal, options, notes)
    runner = options.runner or ("v1" if options.device == "cpu" or proposal.method in V1_ONLY else "v2")
    sequences = options.whole("max_num_seqs")
    synthetic = options.synthetic and proposal.method is not None
    serving = Serving(keys, options.device, runner, prefix_caching, sequences, synthetic)
    if refusal := refuse(models, proposal, serving):
        return refusal
    draft = models.draft if proposal.draft is not None else None
    advice = advise(
        target,
        draft,
        k=proposal.k if proposal.method else 0,
        prefix_caching=prefix_caching,
        length=options.length or options.whole("max_model_len") or min(LENGTH, target.context or LENGTH),
        gpu_memory=options.gpu_memory,
        gpus=options.whole("tensor_parallel_size") or 1,
        utilization=engine.get("gpu_memory_utilization"),
        dtype=engine.get("dtype"),
        state_dtype=engine.get("mamba_ssm_cache_dtype"),
        kv_dtype=engine.get("kv_cache_dtype"),
    )
    if advice is not None and advice.sequences == 0:
        what = f"No sequence of {advice.length} tokens fits: {advice.formula}."
        instead = "fewer tokens (--tokens), a smaller --k, more memory, or --engine tensor_parallel_size=N"
        return Refusal(keys.name, proposal.asked, what, instead)
    _sequences(engine, advice, options, notes)
    if advice is None and models.facts.hybrid:
        notes.append(f"How much state a sequence takes is not known: {target.unknown}.")
    if advice is not None and options.gpu_memory is not None and target.weights is None:
        notes.append("The weight files are not here, so how many sequences fit is not known.")
    _about_method(models, proposal, runner, options, notes)
    return Export(
        keys.name,
        target.path,
        _speculative_config(proposal, options, table),
        {"hybridspec": dict(proposal.plugin)} if proposal.plugin else None,
        {"VLLM_USE_V2_MODEL_RUNNER": "0"} if proposal.method and runner == "v1" and options.device == "gpu" else {},
        engine,
        tuple(notes),
        advice,
    )


def batch_table(by_concurrency: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """``num_speculative_tokens_per_batch_size``: each measured number of requests speaks for the batches up to it, from
    the next smaller one on; vLLM carries the last on. Neighbours with one K are one range.

    Raises:
        InputError: a number of requests below 1, or a K below 0.
    """
    rows = sorted(dict(by_concurrency).items())
    if any(n < 1 or k < 0 for n, k in rows):
        raise InputError(f"by_concurrency must have requests of at least 1 and K of at least 0, not {rows}")
    ranges: list[tuple[int, int, int]] = []
    for (before, _), (n, k) in pairwise([(0, 0), *rows]):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], n, k)
        else:
            ranges.append((before + 1, n, k))
    return ranges


def synthetic_keys(k: int, acceptance: Sequence[float], length: float | None) -> dict[str, Any]:
    """Keys that make vLLM accept by a curve: rates of all K positions, made non-increasing as it demands, or else
    tokens per step.

    Raises:
        InputError: neither is known.
    """
    found: dict[str, Any] = {"rejection_sample_method": "synthetic"}
    if len(acceptance) >= k:
        rates, least = [], 1.0
        for rate in acceptance[:k]:
            least = min(least, rate)
            rates.append(round(least, 4))
        return found | {"synthetic_acceptance_rates": rates}
    if length is None:
        raise InputError(
            f"synthetic acceptance needs rates of {k} positions: give --acceptance with {k} numbers, or a profile"
        )
    return found | {"synthetic_acceptance_length": round(min(max(length, 1.0), k + 1.0), 4)}


def _table(proposal: DraftMethod, options: ExportOptions, notes: list[str]) -> list[tuple[int, int, int]] | None:
    if not options.by_concurrency or proposal.method is None:
        return None
    table = batch_table(options.by_concurrency)
    shown = ", ".join(f"{k} for {a} to {b} requests" for a, b, k in table)
    if proposal.method not in BY_BATCH:
        notes.append(f"K by batch size ({shown}) is left out: vLLM does not change it for {proposal.method}.")
        return None
    if (options.whole("data_parallel_size") or 1) > 1:
        notes.append(f"K by batch size ({shown}) is left out: vLLM turns it off with data parallelism.")
        return None
    notes.append(f"K by batch size: {shown}. State is kept for the largest K all the time.")
    return table


def _engine(
    models: ExportedPair, proposal: DraftMethod, options: ExportOptions, notes: list[str]
) -> tuple[dict[str, Any], bool]:
    """Engine arguments, and whether prefix caching is on beside speculation."""
    engine = dict(options.engine)
    wanted = options.prefix_caching if options.prefix_caching is not None else engine.get("enable_prefix_caching")
    unsafe = models.facts.hybrid and proposal.method is not None
    if options.prefix_caching is not None or unsafe:
        engine["enable_prefix_caching"] = bool(wanted)
    if unsafe and not wanted:
        notes.append(
            "Prefix caching is off (vLLM has it on by itself): together with speculation on hybrids it has cost "
            "accuracy and corrupted outputs in several versions (vllm#43559, #47194, #53912). --prefix-caching turns "
            "it on."
        )
    elif unsafe:
        notes.append(
            "Prefix caching is on, as asked: together with speculation on hybrids it has corrupted outputs in several "
            "versions (vllm#43559, #47194, #53912). Compare outputs with and without it first."
        )
    if options.keys.release < (0, 33) and GATED_DELTA in models.recurrent_mixers and proposal.method is not None:
        notes.append(
            f"Leave {proposal.k} tokens of --max-model-len free: near its end drafts are cut short, which "
            f"{options.keys.name} may die of ('The size of tensor a must match')."
        )
    if options.device == "cpu" and LATENT in models.recurrent_mixers and "enable_prefix_caching" not in engine:
        engine["enable_prefix_caching"] = False
        notes.append(
            "Prefix caching is off: on a CPU vLLM turns it off for latent attention by itself, and then stops over its "
            "own setting ('--mamba-block-size can only be set with --enable-prefix-caching')."
        )
    if options.device == "cpu" and GATED_DELTA in models.recurrent_mixers:
        if engine.setdefault("dtype", "bfloat16") not in ("bfloat16", "auto"):
            notes.append("vLLM's CPU kernels for the gated delta rule take bfloat16 only.")
            engine["dtype"] = "bfloat16"
        if options.keys.release < (0, 33) and proposal.method is not None and "max_num_seqs" not in engine:
            engine["max_num_seqs"] = 1
            notes.append(
                f"One sequence at a time: more are wrong for the gated delta rule in {options.keys.name} on a CPU."
            )
    return engine, bool(wanted) and unsafe


def _sequences(engine: dict[str, Any], advice: MemoryAdvice | None, options: ExportOptions, notes: list[str]) -> None:
    if advice is None or advice.sequences is None:
        return
    given = options.whole("max_num_seqs")
    if given is not None and given > advice.sequences:
        notes.append(f"max_num_seqs = {given} is more than fits: {advice.formula}.")
    elif "max_num_seqs" not in engine and advice.sequences < MOST_SEQUENCES:
        engine["max_num_seqs"] = advice.sequences


def _speculative_config(
    proposal: DraftMethod, options: ExportOptions, table: list[tuple[int, int, int]] | None
) -> dict[str, Any] | None:
    if proposal.method is None:
        return None
    config: dict[str, Any] = {"method": proposal.method}
    if proposal.method == "draft_model":
        config["model"] = proposal.draft
        if (ranks := options.whole("tensor_parallel_size") or 1) > 1:
            config["draft_tensor_parallel_size"] = ranks
    config |= {**proposal.keys, "num_speculative_tokens": proposal.k}
    if table is not None and len(table) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in table]
    if options.synthetic:
        config |= synthetic_keys(proposal.k, options.acceptance, options.acceptance_length)
    unknown = [key for key in config if key not in options.keys.speculative_keys]
    if unknown:
        raise InputError(f"{options.keys.name} has no key {unknown[0]!r} of --speculative-config")
    return config


def _about_method(
    models: ExportedPair, proposal: DraftMethod, runner: Runner, options: ExportOptions, notes: list[str]
) -> None:
    method = proposal.method
    if method == "custom_class":
        notes.append(
            "vLLM calls this interface experimental; it runs on the V1 model runner, without asynchronous scheduling. "
            "hybridspec must be installed beside vLLM."
        )
        if models.draft is not None and models.draft.weights:
            notes.append(
                f"The draft lies outside the memory that vLLM plans with ({amount(models.draft.weights)} of weights): "
                "leave room for it with --gpu-memory-utilization."
            )
    if method == "suffix":
        notes.append(
            "It needs arctic-inference (pip install arctic-inference==0.1.1), and runs on the V1 model runner."
        )
    if method == "mtp" and proposal.k > (models.target.heads or 1):
        notes.append("One head drafts all K tokens in turn: acceptance falls from one position to the next.")
    together = method != "draft_model" or not models.facts.hybrid or in_one_group(models.target, models.draft)
    if not together and runner == "v2":
        notes.append(
            "It needs the V2 model runner, vLLM's choice on GPUs with Triton: on V1 the draft's layers fall into more "
            "than one KV cache group, and it stops."
        )
    if options.synthetic and method is not None:
        notes.append("Synthetic acceptance: the speed is that of the predicted curve, the output is not the target's.")
