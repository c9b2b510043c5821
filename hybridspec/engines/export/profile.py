"""What the configuration that a profile chose for a workload is in vLLM."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridspec.engines.export.draft_method import DraftMethod, NotServable, from_configuration, has_model
from hybridspec.engines.export.models import ExportedPair, read_models
from hybridspec.engines.export.refusals import Refusal
from hybridspec.engines.export.vllm import Export, ExportOptions, export_vllm
from hybridspec.errors import InputError


def export_workload(
    profile: Mapping[str, Any], name: str, options: ExportOptions, where: str = "profile"
) -> Export | Refusal:
    """Settings for one workload.

    Args:
        where: the file, for messages.

    Raises:
        InputError: no such workload, an unfinished one, or a model without a folder; names file and field.
        ModelLoadError: a folder cannot be read.
    """
    workload = profile["workloads"].get(name)
    if workload is None:
        raise InputError(f"{where}: no workload {name!r}; it has {', '.join(profile['workloads']) or 'none'}")
    chosen = workload["chosen"]
    if chosen is None:
        raise InputError(f"{where}: workloads.{name}.chosen: nothing was chosen yet. Run hybridspec tune again.")
    target = profile["target"]["path"]
    if not target:
        raise InputError(f"{where}: target.path: the target was no folder, so vLLM cannot load it. Tune a folder.")
    folder = draft_folder(profile["drafts"], chosen["draft"], where)
    models = read_models(target, folder)
    acceptance = workload["acceptance"].get(chosen["draft"], {}).get("by_position", ())
    options = replace(
        options,
        by_concurrency=concurrency(workload["by_concurrency"]),
        acceptance=options.acceptance or acceptance,
        acceptance_length=workload.get("acceptance_length"),
    )
    return export_configuration(models, chosen, workload["best_k"] or 0, folder, options, workload["trials"])


def export_configuration(
    models: ExportedPair,
    configuration: Mapping[str, Any],
    k: int,
    folder: str | None,
    options: ExportOptions,
    trials: tuple[Mapping[str, Any], ...] | list[Mapping[str, Any]] = (),
) -> Export | Refusal:
    """Settings for a configuration; ``trials`` tell the next best where vLLM has no place for it."""
    try:
        proposal: DraftMethod = from_configuration(configuration, k, folder, models.facts.draft_hybrid)
    except NotServable as error:
        instead = error.instead
        if best := _best_fixed(configuration, trials):
            instead += f" (the best fixed K measured is {best})"
        return Refusal(options.keys.name, configuration["label"], error.text, instead)
    return export_vllm(models, proposal, options)


def draft_folder(drafts: Mapping[str, Any], spec: str, where: str) -> str | None:
    """Folder of the model behind a draft, None for a draft without one."""
    if not spec or not has_model(spec):
        return None
    folder = drafts.get(spec, {}).get("path")
    if not folder:
        raise InputError(f"{where}: drafts.{spec}.path: the draft was no folder, so vLLM cannot load it.")
    return folder


def concurrency(found: Any) -> list[tuple[int, int]]:
    """``(requests, K)`` of ``by_concurrency``, whose entries are ``{"8": {"k": 3, ...}}``.

    Raises:
        InputError: of another form.
    """
    entries = (found or {}).get("concurrency", found or {})
    try:
        return [(int(n), int(entry["k"])) for n, entry in entries.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f'by_concurrency must hold entries like "8": {{"k": 3}}: {error}') from error


def _best_fixed(configuration: Mapping[str, Any], trials: Any) -> str | None:
    """K of the fastest measured trial of the same draft with a fixed K."""
    same = [t for t in trials if t["draft"] == configuration["draft"] and t["length"].isdecimal() and t.get("speedup")]
    return max(same, key=lambda t: t["speedup"])["length"] if same else None
