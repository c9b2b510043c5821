"""A whole tuning run: target, drafts, workloads and their studies from one request, in one process or several."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridspec import embedded
from hybridspec.decoder import check_length
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.errors import HybridspecError, InputError
from hybridspec.runner import RollbackMode, TargetRunner
from hybridspec.tuning.configuration import Bench
from hybridspec.tuning.profile import build_profile
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import Settings, WorkloadStudy, search_space
from hybridspec.tuning.torch_backend import EncodedPrompt, TorchBackend
from hybridspec.tuning.workloads import choose_prompts, find_workload

#: What the embedded target is tuned with when nothing is named.
EMBEDDED_DRAFTS = ("same-architecture:draft-2-layers", "same-architecture:draft-4-layers", "prompt-lookup")
LENGTHS = ("expected-gain", "svip")


@dataclass(frozen=True)
class TuneRequest:
    """Everything that a tuning run depends on; plain values, so that it can be sent to another process.

    ``storage``: an Optuna URL or ``journal:PATH``; None is a SQLite file in ``out``.
    """

    target: Path | None = None
    drafts: tuple[str, ...] = EMBEDDED_DRAFTS
    lengths: tuple[str, ...] = LENGTHS
    segments: bool = False
    workloads: tuple[str, ...] = ()
    out: Path = Path("hybridspec-tune")
    storage: str | None = None
    settings: Settings = field(default_factory=Settings)
    threads: int = 1
    rollback: RollbackMode = "auto"


class Tuning:
    """The studies of one request, opened and checked; nothing is measured yet."""

    def __init__(self, request: TuneRequest) -> None:
        self.request = request
        settings = request.settings
        workloads = [find_workload(name) for name in request.workloads or embedded.workload_files()]
        names = [w.name for w in workloads]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two workloads are called {twice!r}, after their file names: rename one of the files")
        if not request.drafts:
            raise InputError(
                "a target needs at least one draft to be tuned with: --draft FOLDER or --draft prompt-lookup"
            )
        for spec in request.lengths:
            make_length(spec)
        storage = open_storage(request.out, request.storage)
        torch.set_num_threads(request.threads)
        self.target = TargetRunner.from_pretrained(request.target or embedded.TARGET, rollback=request.rollback)
        self.drafts = {spec: make_draft(spec, self.target) for spec in request.drafts}
        space = search_space(request.drafts, request.lengths, settings.longest, request.segments)
        bench = Bench(self.target, drafts=self.drafts)
        models = [self.target.fingerprint, *map(self._draft_identity, request.drafts), self.target.rollback]
        self.studies = []
        for workload in workloads:
            chosen = choose_prompts(workload.prompts, settings.prompts)
            prompts = [EncodedPrompt(p.id, self.target.encode(p.text)) for p in chosen]
            self._check(workload.name, prompts)
            if request.segments and not bench.texts:
                bench.texts = [p.tokens[:256] for p in prompts]
            backend = TorchBackend(
                bench,
                prompts,
                longest=settings.longest,
                max_new_tokens=settings.max_new_tokens,
                repeats=settings.repeats,
                sampling=settings.sampling,
                seed=settings.seed,
            )
            identity = [models, request.threads, request.lengths, request.segments, [(p.id, p.tokens) for p in prompts]]
            self.studies.append(WorkloadStudy(workload.name, backend, space, settings, storage, identity))

    def _draft_identity(self, spec: str) -> str:
        runner = getattr(self.drafts[spec], "runner", None)
        return f"{spec} {runner.fingerprint}" if isinstance(runner, TargetRunner) else spec

    def _check(self, workload: str, prompts: Sequence[EncodedPrompt]) -> None:
        """Raises before any measurement if a prompt, its output and the longest block do not fit into the context."""
        for prompt in prompts:
            try:
                check_length(
                    self.target, prompt.tokens, self.request.settings.max_new_tokens, self.request.settings.longest
                )
            except HybridspecError as error:
                raise type(error)(f"workload {workload}, prompt {prompt.id}: {error}") from error

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
