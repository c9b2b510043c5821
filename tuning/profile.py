"""The profile: what a tuning run found, and the vLLM setting that follows from it."""

import dataclasses
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version

import torch

from hybridspec.decoding.draft import Draft
from hybridspec.engines.export.key_sets import choose_key_set
from hybridspec.engines.export.models import read_models
from hybridspec.engines.export.profile import draft_folder, export_configuration
from hybridspec.engines.export.refusals import Refusal
from hybridspec.engines.export.vllm import ExportOptions
from hybridspec.errors import HybridspecError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.configuration import Configuration
from hybridspec.tuning.cost_model import wilson_interval
from hybridspec.tuning.profile_file import FILE, SCHEMA
from hybridspec.tuning.study import Settings, WorkloadResult


def build_profile(
    target: TargetRunner,
    drafts: Mapping[str, Draft],
    settings: Settings,
    results: Sequence[WorkloadResult],
    threads: int,
    backend: str = "torch",
) -> dict:
    """``drafts`` by the specs that configurations name them by."""
    described = describe_model(target), {spec: describe_draft(draft) for spec, draft in drafts.items()}
    profile = profile_frame(backend, *described, settings, threads)
    profile["workloads"] = {r.name: describe_result(r, *described) for r in results}
    return profile


def profile_frame(
    backend: str, target: Mapping[str, object], drafts: Mapping[str, object], settings: Settings, threads: int
) -> dict:
    """A profile without workloads; target and drafts as it describes them."""
    return {
        "schema": SCHEMA,
        "hybridspec": version("hybridspec"),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backend": backend,
        "target": dict(target),
        "drafts": dict(drafts),
        "machine": describe_machine(threads),
        "settings": dataclasses.asdict(settings),
        "workloads": {},
    }


def describe_model(runner: TargetRunner) -> dict:
    kinds = getattr(runner.config, "layer_types", None) or ["full_attention"] * runner.config.num_hidden_layers
    return {
        "name": runner.name,
        "path": str(runner.path) if runner.path else None,
        "fingerprint": runner.fingerprint,
        "model_type": runner.config.model_type,
        "parameters": sum(p.numel() for p in runner.model.parameters()),
        "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "rollback": runner.rollback,
        "compiled": runner.compiled is not None,
        "packed": runner.packed is not None,
    }


def describe_draft(draft: Draft) -> dict:
    """The model of a draft that has one of its own, else its name."""
    runner = getattr(draft, "runner", None)
    return describe_model(runner) if isinstance(runner, TargetRunner) else {"name": draft.name}


def describe_machine(threads: int) -> dict:
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def describe_result(result: WorkloadResult, target: Mapping[str, object], drafts: Mapping[str, object]) -> dict:
    answer, best, survey = result.answer, result.best, result.survey
    errors = result.prediction_errors
    return {
        "settings": dataclasses.asdict(result.settings),
        "complete": result.stopped is not None,
        "stopped": result.stopped,
        "chosen": describe_configuration(answer.configuration) if answer else None,
        "reason": answer.reason if answer else None,
        "best_k": largest_k(answer.configuration) if answer else None,
        "speedup": (best.speedup if best else 1.0) if answer else None,
        "speedup_interval_90": list(best.interval) if best else None,
        "cpu_speedup": best.cpu_speedup if best else None,
        "acceptance_rate": best.acceptance_rate if best else None,
        "acceptance_length": best.acceptance_length if best else None,
        "ideal_speedup": best.ideal_speedup if best else None,
        "efficiency": best.efficiency if best else None,
        "acceptance": {} if survey is None else {name: describe_acceptance(d) for name, d in survey.drafts.items()},
        "costs": None
        if survey is None
        else {
            "target_step_seconds": survey.target_step_seconds,
            "draft_ratio": {name: d.cost for name, d in survey.drafts.items()},
            "verify_ratio_by_k": survey.verify_ratio,
            "rollback_ratio": survey.rollback_ratio,
        },
        "predicted": []
        if survey is None
        else [{**describe_configuration(c), "speedup": value} for c, value in survey.predicted.items()],
        "prediction_error_median": statistics.median(map(abs, errors.values())) if errors else None,
        "trials": [
            {**describe_configuration(c), "pruned": False, **dataclasses.asdict(m)}
            for c, m in result.measurements.items()
        ]
        + [{**describe_configuration(c), "pruned": True} for c in result.pruned],
        "by_concurrency": None,
        "vllm": vllm_setting(answer.configuration, target, drafts) if answer else None,
    }


def describe_configuration(configuration: Configuration) -> dict:
    return {**dataclasses.asdict(configuration), "label": configuration.label}


def describe_acceptance(draft: object) -> dict:
    """By position, unconditional: share of the steps that drafted it in which it was accepted, with 90 % intervals."""
    counts = list(zip(draft.accepted, draft.drafted, strict=True))
    return {
        "by_position": [a / d for a, d in counts],
        "interval_90": [list(wilson_interval(a, d)) for a, d in counts],
        "steps": draft.drafted[0] if draft.drafted else 0,
    }


def largest_k(configuration: Configuration) -> int:
    """Most tokens that a configuration drafts at once: what an engine must reserve for it."""
    from hybridspec.drafts.registry import make_length

    return make_length(configuration.length).longest


def vllm_setting(
    configuration: Configuration,
    target: Mapping[str, object],
    drafts: Mapping[str, object],
    options: ExportOptions | None = None,
) -> dict | None:
    """How to serve the configuration with the newest vLLM that is known, as ``hybridspec export vllm`` says it in full,
    or ``{"refused": why}``; None where plain decoding wins or the models are no folders.

    Args:
        target, drafts: as the profile describes them.
        options: another version of vLLM, where and how it serves.
    """
    if configuration.plain or not target["path"]:
        return None
    try:
        options = options or ExportOptions(choose_key_set()[0])
        folder = draft_folder(drafts, configuration.draft, FILE)
        models = read_models(str(target["path"]), folder)
        k = largest_k(configuration)
        result = export_configuration(models, describe_configuration(configuration), k, folder, options)
    except HybridspecError as error:
        return {"refused": str(error)}
    if isinstance(result, Refusal):
        return {"refused": str(result)}
    names = ("version", "speculative_config", "additional_config", "environment", "engine_arguments")
    return {name: result.to_dict()[name] for name in names}
