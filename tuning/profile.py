"""The profile: what a tuning run found, as JSON, and the vLLM setting that follows from it."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from hybridspec.runner import TargetRunner
from hybridspec.tuning.study import Settings, WorkloadResult

SCHEMA = 1
PROPOSER = "hybridspec.vllm_plugin.HybridDraftProposer"


def build_profile(
    target: TargetRunner, draft: TargetRunner, settings: Settings, results: Sequence[WorkloadResult], threads: int
) -> dict:
    return {
        "schema": SCHEMA,
        "hybridspec": version("hybridspec"),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "target": describe_model(target),
        "draft": describe_model(draft),
        "machine": describe_machine(threads),
        "settings": dataclasses.asdict(settings),
        "workloads": {r.name: describe_result(r, draft) for r in results},
    }


def describe_model(runner: TargetRunner) -> dict:
    kinds = getattr(runner.config, "layer_types", None) or ["full_attention"] * runner.config.num_hidden_layers
    return {
        "name": runner.name,
        "path": str(runner.path) if runner.path else None,
        "model_type": runner.config.model_type,
        "parameters": sum(p.numel() for p in runner.model.parameters()),
        "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "rollback": runner.rollback,
    }


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


def describe_result(result: WorkloadResult, draft: TargetRunner) -> dict:
    best, costs = result.best, result.costs
    return {
        "complete": result.complete,
        "best_k": result.best_k,
        "speedup": best.speedup if best else None,
        "speedup_interval_90": best.interval if best else None,
        "cpu_speedup": best.cpu_speedup if best else None,
        "acceptance_rate": best.acceptance_rate if best else None,
        "acceptance_length": best.acceptance_length if best else None,
        "ideal_speedup": result.ideal,
        "efficiency": result.efficiency,
        "costs": None
        if costs is None
        else {
            "target_step_seconds": costs.target_step,
            "draft_ratio": costs.draft_ratio,
            "verify_ratio_by_k": [costs.verify_ratio(k) for k in range(len(costs.verify))],
            "rollback_ratio": costs.rollback / costs.target_step,
        },
        "measured": {str(k): dataclasses.asdict(m) for k, m in sorted(result.measurements.items())},
        "predicted_speedup": {str(k): s for k, s in result.predicted.items()},
        "vllm": vllm_setting(result.best_k, draft),
    }


def vllm_setting(k: int | None, draft: TargetRunner) -> dict | None:
    """How to serve with ``k`` in vLLM; None where plain decoding wins or nothing is known yet.

    Stock vLLM (0.33) refuses a hybrid draft under ``draft_model``, so the setting names our proposer, which needs its
    V1 runner.
    """
    if not k:
        return None
    return {
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": k},
        "additional_config": {"hybridspec": {"draft": str(draft.path) if draft.path else draft.name}},
        "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        "other_arguments": ["--no-enable-prefix-caching"],
    }


def write_profile(profile: dict, out: Path) -> Path:
    """Writes ``profile.json`` and one ``speculative-config-<workload>.json`` for each workload that speculation
    speeds up.

    A workload that plain decoding wins gets no file, and an old one of an earlier run is removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, workload in profile["workloads"].items():
        snippet = out / f"speculative-config-{name}.json"
        if workload["vllm"]:
            _replace(snippet, json.dumps(workload["vllm"]["speculative_config"]) + "\n")
        else:
            snippet.unlink(missing_ok=True)
    path = out / "profile.json"
    _replace(path, json.dumps(profile, indent=2) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
