"""A tuning run on vLLM: no model is loaded here, only configs and tokenizers are read."""

import dataclasses
import json
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridspec import embedded
from hybridspec.decoding.target import EngineTarget
from hybridspec.drafts.registry import make_length
from hybridspec.engines.audit.engine import Engine
from hybridspec.engines.export.draft_method import has_model
from hybridspec.engines.export.key_sets import DISTRIBUTIONS, choose_key_set
from hybridspec.engines.export.models import ExportedPair, read_models
from hybridspec.engines.export.profile import export_configuration
from hybridspec.engines.export.refusals import Refusal
from hybridspec.engines.export.vllm import Export, ExportOptions
from hybridspec.errors import InputError
from hybridspec.runtime.loading import folder_fingerprint, load_tokenizer
from hybridspec.specs import split_options
from hybridspec.tuning.backends.by_concurrency import one_draft, table
from hybridspec.tuning.backends.engine_runs import EngineRuns
from hybridspec.tuning.backends.request_loads import Load
from hybridspec.tuning.backends.vllm_backend import VllmBackend
from hybridspec.tuning.config import TuneConfig
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_building import (
    describe_configuration,
    describe_result,
    largest_k,
    profile_frame,
    vllm_setting,
)
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import WorkloadResult, WorkloadStudy, search_space
from hybridspec.tuning.workloads.encoding import encode_workload
from hybridspec.tuning.workloads.sources import find_workloads

#: Seconds that an engine may take for all loads, its start included.
PATIENCE = 7200.0
VERSIONS = """
import importlib.metadata, json
found = []
for name in {names!r}:
    try:
        found.append([name, importlib.metadata.version(name)])
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def engine_version(python: str) -> tuple[str, bool]:
    """Version of the vLLM of an interpreter, and whether it is the build for CPUs.

    Raises:
        InputError: no such interpreter, or it has no vLLM.
    """
    code = VERSIONS.format(names=DISTRIBUTIONS)
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--python {python}: cannot be started: {error}") from error
    found = json.loads(answer.stdout) if answer.returncode == 0 else []
    if not found:
        raise InputError(f"--python {python}: it has no vLLM. Name the interpreter of the environment that has it.")
    return found[0][1], any("cpu" in name or "+cpu" in version for name, version in found)


class VllmTuning:
    """The studies of one request, opened and checked; no engine runs yet. One study for each workload and concurrency.

    Attributes:
        left_out: drafts that vLLM cannot serve -> why.
    """

    def __init__(self, config: TuneConfig) -> None:
        self.config = config
        serving = config.engine
        self.folder = Path(config.target or embedded.TARGET).resolve()
        self.version, cpu = engine_version(config.interpreter)
        keys = choose_key_set(self.version)[0]
        arguments = serving.engine_arguments()
        # Prompts are sent several times: a cache would make later rounds other rounds.
        caching = bool(arguments.get("enable_prefix_caching"))
        self.options = ExportOptions(keys, "cpu" if cpu else "gpu", prefix_caching=caching, engine=arguments)
        self._models: dict[str | None, ExportedPair] = {}
        self.concurrency = serving.concurrency or (1,)
        plain = self._exported(PLAIN)
        if isinstance(plain, Refusal):
            raise InputError(f"vLLM cannot serve this target: {plain}")
        space = self._space(config)
        for configuration in space:
            self._check_sequences(configuration)
        storage = open_storage(config.out, config.storage)
        engine = Engine(config.interpreter, str(self.folder), [], (config.out / "engines").resolve(), PATIENCE)
        names = dict.fromkeys(self.draft_folder(c.draft) for c in space)
        identity = [folder_fingerprint(Path(f)) for f in (self.folder, *filter(None, names))]
        self.runs = EngineRuns(engine, self.export, (), [identity, self.version])
        loads = self._loads(config)
        self.runs.loads = loads
        self.studies: list[WorkloadStudy] = []
        self._by_workload: dict[str, dict[int, WorkloadStudy]] = {}
        for load in loads:
            own = load.settings.replaced(prompts=len(load.rounds), repeats=1)
            whole = [identity, self.version, plain.arguments, space, load.ids, load.prompts, load.rounds]
            study = WorkloadStudy(load.name, VllmBackend(self.runs, load), space, own, storage, whole)
            self.studies.append(study)
            self._by_workload.setdefault(load.workload, {})[load.concurrency] = study

    def _space(self, config: TuneConfig) -> list[Configuration]:
        """What vLLM can serve of drafts, Ks and rules."""
        if config.segments:
            raise InputError("--segments: vLLM verifies each block in one pass; leave it out")
        if not config.draft_specs:
            raise InputError("a target needs at least one draft: --draft FOLDER, mtp or prompt-lookup")
        for spec in config.rules:
            make_length(spec)
        self.left_out: dict[str, str] = {}
        space = []
        for configuration in search_space(config.draft_specs, config.rules, config.settings.max_k):
            result = self._exported(configuration)
            if isinstance(result, Export):
                space.append(configuration)
            elif configuration.length == str(config.settings.max_k):
                self.left_out[configuration.draft] = str(result)
            elif not configuration.length.isdecimal():
                self.left_out[configuration.label] = str(result)
        # The largest K is what the others are predicted from.
        space = [c for c in space if c.draft not in self.left_out]
        if len(space) < 2:
            reasons = "\n".join(f"  {draft}: {reason}" for draft, reason in self.left_out.items())
            raise InputError(f"vLLM can serve none of the drafts:\n{reasons}")
        return space

    def _check_sequences(self, configuration: Configuration) -> None:
        most = self.export(configuration).engine_arguments.get("max_num_seqs")
        if most is not None and max(self.concurrency) > most:
            raise InputError(
                f"concurrency {max(self.concurrency)} is more than the {most} sequences (max_num_seqs) that vLLM takes "
                f"with {configuration.label}. Choose a smaller --concurrency, or set max_num_seqs under [serving]."
            )

    def _loads(self, config: TuneConfig) -> list[Load]:
        serving, settings = config.engine, config.settings
        lengths = [n for n in (self.models(None).target.context, serving.max_model_len) if n]
        tokenizer = load_tokenizer(self.folder)
        rows = self.models(None).facts.vocabularies[0] or len(tokenizer)
        target = EngineTarget(self.folder.name, rows, tokenizer, min(lengths, default=2**31))
        loads = []
        for workload in find_workloads(config.workloads or embedded.workload_files()):
            prompts = encode_workload(target, workload, settings.prompts, settings.max_new_tokens, settings.max_k)
            own = {name: v for name in ("max_new_tokens", "temperature") if (v := getattr(workload, name)) is not None}
            each = settings.replaced(**own)
            ids, tokens = tuple(p.id for p in prompts), tuple(p.tokens for p in prompts)
            loads += [Load(workload.name, c, ids, tokens, each) for c in sorted(set(self.concurrency))]
        return loads

    def models(self, draft: str | None) -> ExportedPair:
        if draft not in self._models:
            self._models[draft] = read_models(str(self.folder), draft)
        return self._models[draft]

    def export(self, configuration: Configuration) -> Export:
        result = self._exported(configuration)
        if isinstance(result, Refusal):
            raise InputError(f"{configuration.label}: {result}")
        return result

    def _exported(self, configuration: Configuration) -> Export | Refusal:
        folder = self.draft_folder(configuration.draft)
        described = describe_configuration(configuration)
        return export_configuration(self.models(folder), described, largest_k(configuration), folder, self.options)

    def draft_folder(self, spec: str) -> str | None:
        """Folder of a draft that is a model; embedded ones by name."""
        if not spec or not has_model(spec):
            return None
        name, _, text = spec.partition(":")
        if name != "same-architecture":
            return str(Path(spec).resolve())
        value = next((value for _, key, value in split_options(text) if key in (None, "path")), None)
        if value is None:
            raise InputError(f"draft {spec!r}: write same-architecture:FOLDER")
        return str(Path(embedded.DRAFTS.get(value, value)).resolve())

    @cached_property
    def _described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        specs = dict.fromkeys(c.draft for c in self.studies[0].space if c.draft)
        drafts = {}
        for spec in specs:
            folder = self.draft_folder(spec)
            drafts[spec] = {"name": spec} if folder is None else self._describe(Path(folder), self.models(folder).draft)
        return self._describe(self.folder, self.models(None).target), drafts

    def _describe(self, folder: Path, model: Any) -> dict[str, Any]:
        kinds = [str(kind) for kind in model.kinds]
        return {
            "name": folder.name,
            "path": str(folder),
            "fingerprint": folder_fingerprint(folder),
            "model_type": model.model_type,
            "layers": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "dtype": self.export(PLAIN).engine_arguments.get("dtype"),
        }

    def profile(self) -> Profile:
        """What the storage knows by now."""
        target, drafts = self._described
        profile = profile_frame("vllm", target, drafts, self.config.settings, self.config.threads)
        profile["engine"] = {"version": self.version, "python": self.config.interpreter, "device": self.options.device}
        profile["left_out"] = self.left_out
        for workload, studies in self._by_workload.items():
            results = {c: study.result() for c, study in studies.items()}
            row = self._row(results, target, drafts)
            row["settings"] = next(iter(studies.values())).backend.load.settings.to_dict()
            profile["workloads"][workload] = row
        return Profile.model_validate(profile)

    def _row(self, results: dict[int, WorkloadResult], target: dict, drafts: dict) -> dict[str, Any]:
        """The lowest concurrency's result, the table of all, and settings that serve all."""
        lowest = results[min(results)]
        row = describe_result(lowest, target, drafts)
        row["complete"] = all(r.stopped is not None for r in results.values())
        row["by_concurrency"] = rows = table(results)
        row["vllm"] = None
        draft = one_draft(results)
        if rows and draft:
            ks = {int(c): entry["k"] for c, entry in rows.items()}
            most = max(rows.values(), key=lambda entry: entry["k"])
            # Served prompts are not measured ones: prefix caching is as export decides.
            caching = self.config.engine.enable_prefix_caching
            options = dataclasses.replace(self.options, by_concurrency=tuple(ks.items()), prefix_caching=caching)
            row["vllm"] = vllm_setting(Configuration(draft, most["length"]), target, drafts, options)
        return row
