"""A whole tuning run: target, drafts, workloads and their studies, in one process or several."""

import multiprocessing
from collections.abc import Callable

import torch

from hybridspec import embedded
from hybridspec.decoding.sampling import Sampling
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.errors import InputError
from hybridspec.runtime.compile_ahead import compile_ahead
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.torch_backend import TorchBackend
from hybridspec.tuning.config import TuneConfig
from hybridspec.tuning.configuration import Bench
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_building import build_profile
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import WorkloadStudy, search_space
from hybridspec.tuning.workloads.encoding import encode_workload
from hybridspec.tuning.workloads.sources import choose_prompts, find_workloads


class Tuning:
    """The studies of a configuration, opened and checked; nothing is measured yet.

    Args:
        tell: called with what is being compiled, where that was asked for.

    Raises:
        UnsupportedLayerError: compiled passes were asked for, and a model cannot be compiled.
    """

    def __init__(self, config: TuneConfig, tell: Callable[[str], object] = lambda text: None) -> None:
        self.config, settings = config, config.settings
        workloads = find_workloads(config.workloads or embedded.workload_files())
        if not config.draft_specs:
            raise InputError(
                "a target needs at least one draft to be tuned with: --draft FOLDER or --draft prompt-lookup"
            )
        for spec in config.rules:
            make_length(spec)
        storage = open_storage(config.out, config.storage)
        torch.set_num_threads(config.threads)
        self.target = TargetRunner.from_pretrained(config.target or embedded.TARGET, options=config.load)
        self.drafts = {spec: make_draft(spec, self.target) for spec in config.draft_specs}
        space = search_space(self.drafts, config.rules, settings.max_k, config.segments)
        bench = Bench(self.target, drafts=self.drafts)
        models = [self.target.fingerprint, *map(self._draft_identity, config.draft_specs)]
        load = config.load
        models += [
            self.target.rollback,
            load.dtype,
            load.device,
            *["compiled"] * load.compile,
            *["packed"] * load.packed,
        ]
        self.studies = []
        for workload in workloads:
            # A workload that says how many prompts means just these.
            reserve = settings.reserve if workload.count is None else 0
            drawn = encode_workload(
                self.target, workload, settings.prompts + reserve, settings.max_new_tokens, settings.max_k
            )
            prompts = choose_prompts(drawn, settings.prompts) if reserve else drawn
            more_prompts = [p for p in drawn if p not in prompts]
            own = {name: v for name in ("max_new_tokens", "temperature") if (v := getattr(workload, name)) is not None}
            each = settings.replaced(prompts=len(prompts), **own)
            if config.segments and not bench.texts:
                bench.texts = [list(p.tokens[:256]) for p in prompts]
            backend = TorchBackend(
                bench,
                prompts,
                more_prompts=more_prompts,
                max_k=each.max_k,
                max_new_tokens=each.max_new_tokens,
                repeats=each.repeats,
                sampling=Sampling(each.temperature, each.top_k, each.top_p),
                seed=each.seed,
            )
            texts = [(p.id, p.tokens) for p in backend.prompts]
            identity = [models, config.threads, config.rules, config.segments, texts]
            self.studies.append(WorkloadStudy(workload.name, backend, space, each, storage, identity))
        # The last of it, for it takes minutes; no measurement should pay for it.
        compile_ahead(self.target, self.drafts.values(), settings.max_k, tell)

    def _draft_identity(self, spec: str) -> str:
        runner = getattr(self.drafts[spec], "runner", None)
        return f"{spec} {runner.fingerprint}" if isinstance(runner, TargetRunner) else spec

    def profile(self) -> Profile:
        """What the storage knows by now."""
        results = [study.result() for study in self.studies]
        return build_profile(self.target, self.drafts, self.config.settings, results, self.config.threads)


def work(config: TuneConfig) -> None:
    """What a further worker does: the same studies, quietly. An interrupt of the whole group just ends it."""
    try:
        for study in Tuning(config).studies:
            study.run()
    except KeyboardInterrupt:
        return


def start_workers(config: TuneConfig, count: int) -> list[multiprocessing.process.BaseProcess]:
    """``count`` processes that help with the studies. Join them."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(config,), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    return workers
