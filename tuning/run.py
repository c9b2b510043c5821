"""A whole tuning run: target, drafts, workloads and their studies from one request, in one process or several."""

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hybridspec import embedded
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.errors import InputError
from hybridspec.runtime.compile_ahead import compile_ahead
from hybridspec.runtime.runner import RollbackMode, TargetRunner
from hybridspec.specs import draft_spec
from hybridspec.tuning.backends.torch_backend import TorchBackend
from hybridspec.tuning.config_file import Backend, DType, ServingOptions, TuneConfig
from hybridspec.tuning.configuration import Bench
from hybridspec.tuning.profile import build_profile
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import Settings, WorkloadStudy, search_space
from hybridspec.tuning.workloads.encoding import encode_workload
from hybridspec.tuning.workloads.sources import WorkloadSource, choose_prompts, find_workloads

#: What the embedded target is tuned with when nothing is named.
EMBEDDED_DRAFTS = ("same-architecture:draft-2-layers", "prompt-lookup")
LENGTHS = ("expected-gain", "svip")
#: Engines and servers take minutes where the runner takes seconds: fewer trials, and no limit unless one is set.
ENGINE_TRIALS = 3

SETTINGS = ("prompts", "more_prompts", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "trials", "seconds")
#: Fields that a configuration and a request, or its settings, have under one name.
SHARED = (*SETTINGS, "target", "out", "storage", "threads", "rollback", "dtype", "device", "compile", "packed")


@dataclass(frozen=True)
class TuneRequest:
    """Everything that a tuning run depends on; plain values, so that it can be sent to another process.

    ``storage``: an Optuna URL or the path of a journal file; None is a SQLite file in ``out``. ``python``: the
    interpreter that has vLLM.
    """

    target: Path | None = None
    drafts: tuple[str, ...] = EMBEDDED_DRAFTS
    lengths: tuple[str, ...] = LENGTHS
    segments: bool = False
    workloads: tuple[str | WorkloadSource, ...] = ()
    out: Path = Path("hybridspec-tune")
    storage: str | None = None
    settings: Settings = field(default_factory=Settings)
    threads: int = 1
    rollback: RollbackMode = "auto"
    dtype: DType = "float32"
    device: str = "cpu"
    compile: bool = False
    packed: bool = False
    backend: Backend = "torch"
    serving: ServingOptions = ServingOptions()
    python: str = sys.executable

    @classmethod
    def from_config(cls, config: TuneConfig, **settings: object) -> "TuneRequest":
        """What a configuration says, with defaults for what it leaves out; ``settings`` are those it has no key for."""
        given = {name: getattr(config, name) for name in SHARED if getattr(config, name) is not None}
        if config.max_k is not None:
            settings["longest"] = config.max_k
        settings |= {name: given.pop(name) for name in list(given) if name in SETTINGS}
        if settings.get("seconds") == 0:
            settings["seconds"] = None
        if config.lengths:
            given["lengths"] = tuple(spec for spec in config.lengths if spec != "fixed")
        if config.drafts or config.target is not None:
            given["drafts"] = tuple(map(draft_spec, config.drafts))
        if config.backend != "torch":
            given.setdefault("lengths", ())
            settings = {"seconds": None, "trials": ENGINE_TRIALS, **settings}
        serving = config.serving
        if config.dtype is not None:
            serving = replace(serving, engine={"dtype": config.dtype, **serving.engine})
        given |= {"backend": config.backend, "serving": serving}
        return cls(workloads=config.workloads, settings=Settings(**settings), **given)


class Tuning:
    """The studies of one request, opened and checked; nothing is measured yet.

    Args:
        tell: called with what is being compiled, where that was asked for.

    Raises:
        UnsupportedLayerError: compiled passes were asked for, and a model cannot be compiled.
    """

    def __init__(self, request: TuneRequest, tell: Callable[[str], object] = lambda text: None) -> None:
        self.request = request
        settings = request.settings
        workloads = find_workloads(request.workloads or embedded.workload_files())
        if not request.drafts:
            raise InputError(
                "a target needs at least one draft to be tuned with: --draft FOLDER or --draft prompt-lookup"
            )
        for spec in request.lengths:
            make_length(spec)
        storage = open_storage(request.out, request.storage)
        torch.set_num_threads(request.threads)
        self.target = TargetRunner.from_pretrained(
            request.target or embedded.TARGET,
            rollback=request.rollback,
            dtype=getattr(torch, request.dtype),
            device=request.device,
            compile=request.compile,
            packed=request.packed,
        )
        self.drafts = {spec: make_draft(spec, self.target) for spec in request.drafts}
        space = search_space(self.drafts, request.lengths, settings.longest, request.segments)
        bench = Bench(self.target, drafts=self.drafts)
        models = [self.target.fingerprint, *map(self._draft_identity, request.drafts)]
        models += [
            self.target.rollback,
            request.dtype,
            request.device,
            *["compiled"] * request.compile,
            *["packed"] * request.packed,
        ]
        self.studies = []
        for workload in workloads:
            # A workload that says how many prompts means just these.
            reserve = settings.reserve if workload.count is None else 0
            drawn = encode_workload(
                self.target, workload, settings.prompts + reserve, settings.max_new_tokens, settings.longest
            )
            prompts = choose_prompts(drawn, settings.prompts) if reserve else drawn
            more_prompts = [p for p in drawn if p not in prompts]
            own = {name: v for name in ("max_new_tokens", "temperature") if (v := getattr(workload, name)) is not None}
            each = replace(settings, prompts=len(prompts), **own)
            if request.segments and not bench.texts:
                bench.texts = [list(p.tokens[:256]) for p in prompts]
            backend = TorchBackend(
                bench,
                prompts,
                more_prompts=more_prompts,
                longest=each.longest,
                max_new_tokens=each.max_new_tokens,
                repeats=each.repeats,
                sampling=each.sampling,
                seed=each.seed,
            )
            texts = [(p.id, p.tokens) for p in backend.prompts]
            identity = [models, request.threads, request.lengths, request.segments, texts]
            self.studies.append(WorkloadStudy(workload.name, backend, space, each, storage, identity))
        # The last of it, for it takes minutes; no measurement should pay for it.
        compile_ahead(self.target, self.drafts.values(), settings.longest, tell)

    def _draft_identity(self, spec: str) -> str:
        runner = getattr(self.drafts[spec], "runner", None)
        return f"{spec} {runner.fingerprint}" if isinstance(runner, TargetRunner) else spec

    def profile(self) -> dict:
        """What the storage knows by now."""
        results = [study.result() for study in self.studies]
        return build_profile(self.target, self.drafts, self.request.settings, results, self.request.threads)


def work(request: TuneRequest) -> None:
    """What a further worker does: the same studies, quietly. An interrupt of the whole group just ends it."""
    try:
        for study in Tuning(request).studies:
            study.run()
    except KeyboardInterrupt:
        return


def start_workers(request: TuneRequest, count: int) -> list[multiprocessing.process.BaseProcess]:
    """``count`` processes that help with the request's studies. Join them."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(request,), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers
