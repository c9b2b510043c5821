"""Configuration files of ``hybridspec tune``: TOML, checked whole before anything is loaded."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hybridspec import embedded
from hybridspec.embedded import workload_files
from hybridspec.errors import InputError
from hybridspec.runtime.runner import RollbackMode
from hybridspec.specs import LENGTHS, STRATEGIES, Registry, draft_spec, split_options
from hybridspec.tuning.fields import at_least, convert, fill, shown
from hybridspec.tuning.workloads.rows import SUFFIXES
from hybridspec.tuning.workloads.sources import WorkloadSource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Backend = Literal["torch", "vllm", "server"]
DType = Literal["float32", "bfloat16", "float16"]
#: What a configuration file calls the embedded target.
EMBEDDED = "embedded"
#: Strategies whose first option is a folder.
FOLDER_FIRST = ("same-architecture", "mtp")


@dataclass(frozen=True)
class ServingOptions:
    """How vLLM serves the target; what is None is left to vLLM.

    Attributes:
        url: of running OpenAI-compatible servers, for the ``server`` backend: one, or a list of several that serve one
            target with other K or none.
        concurrency: numbers of requests at a time for which K is chosen.
        engine: further engine arguments, by vLLM's own names, handed over as they are.

    The others are engine arguments of vLLM under their own names.
    """

    url: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    enable_expert_parallel: bool | None = None
    enforce_eager: bool | None = None
    kv_cache_dtype: str | None = None
    trust_remote_code: bool | None = None
    engine: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "tensor_parallel_size": 1}
        at_least(least, self)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(f"gpu_memory_utilization must lie above 0 and up to 1, not {self.gpu_memory_utilization}")
        if any(c < 1 for c in self.concurrency):
            raise InputError(f"concurrency must be at least 1, not {min(self.concurrency)}")
        if "speculative_config" in self.engine:
            raise InputError("engine.speculative_config is what is to be found: leave it out")
        if twice := next((name for name in self.engine if name in vars(self)), None):
            raise InputError(f"engine.{twice}: write {twice} in [serving] itself")

    def engine_arguments(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``, without model and dtype."""
        own = {k: v for k, v in vars(self).items() if k not in ("url", "concurrency", "engine") and v is not None}
        return {**own, **self.engine}


@dataclass(frozen=True)
class TuneConfig:
    """What a file says; what it leaves out is None or empty, for the command's defaults to fill.

    Attributes:
        target: checkpoint folder; None is the embedded target.
        drafts: as :func:`~hybridspec.drafts.registry.make_draft` reads them.
        lengths: draft-length rules, as :func:`~hybridspec.drafts.registry.make_length` reads them; ``fixed`` stands
            for every K up to ``max_k``.
        max_k: longest draft length.
        prompts, max_new_tokens, temperature: for workloads that do not say themselves.
        more_prompts: further ones for an answer inside the noise; None: as many again.
        trials, seconds: limits for each workload.
        compile: run target and drafts compiled, see :mod:`hybridspec.runtime.compiled`; ``torch`` only.
        packed: run them on packed weights, see :mod:`hybridspec.runtime.packed`; ``torch`` only.
        backend: ``torch`` (this package's runner), ``vllm`` (its engine in a process of ours) or ``server``.
        storage: Optuna storage URL or journal file; else an SQLite file in ``out``.
        out: folder of the study, the profile and the report.
        serving: for the vLLM backends and for the exported configuration.
        path: the file that this was read from.
    """

    target: Path | None = None
    drafts: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    max_k: int | None = None
    workloads: tuple[WorkloadSource, ...] = ()
    prompts: int | None = None
    more_prompts: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    trials: int | None = None
    seconds: float | None = None
    workers: int | None = None
    storage: str | None = None
    backend: Backend = "torch"
    threads: int | None = None
    rollback: RollbackMode | None = None
    dtype: DType | None = None
    device: str | None = None
    compile: bool | None = None
    packed: bool | None = None
    out: Path | None = None
    serving: ServingOptions = ServingOptions()
    path: Path | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        least = {"max_k": 1, "prompts": 1, "max_new_tokens": 2, "temperature": 0, "top_k": 1, "seed": 0}
        at_least({**least, "more_prompts": 0, "trials": 1, "seconds": 0, "workers": 1, "threads": 1}, self)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must lie above 0 and up to 1, not {self.top_p}")
        for registry, specs in ((STRATEGIES, self.drafts), (LENGTHS, self.lengths)):
            for spec in specs:
                check_name(registry, spec)
        names = [w.name or Path(w.source).stem for w in self.workloads]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two workloads are called {twice!r}: give one another name")
        if self.target is not None and not self.drafts and self.backend == "torch":
            raise InputError("drafts is missing: the embedded draft fits the embedded target only")
        if self.backend not in get_args(Backend):
            raise InputError(f"backend is {self.backend!r}: choose one of {', '.join(get_args(Backend))}")
        for name in ("compile", "packed"):
            if getattr(self, name) and self.backend != "torch":
                raise InputError(
                    f"{name} is for backend torch, this package's own runner, and the backend is {self.backend}: leave "
                    f"it out (--{name})"
                )
        if self.backend == "server" and not self.serving.url:
            raise InputError(
                'serving.url is missing: backend = "server" needs the address of the running server (--url)'
            )

    def override(self, **flags: object) -> "TuneConfig":
        """With the flags that were given in place of what the file says; flags that are None were not.

        Lists may be lists or tuples; workloads may be texts as ``--workload`` takes them.
        """
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items() if v is not None and v != []}
        if "workloads" in given:
            given["workloads"] = tuple(WorkloadSource.parse(w) if isinstance(w, str) else w for w in given["workloads"])
        changed = dataclasses.replace(self, **given)
        object.__setattr__(changed, "path", self.path)
        return changed


def load_config(path: Path) -> TuneConfig:
    """Reads and checks a file. Relative paths in it are relative to its folder.

    Raises:
        InputError: no such file, not TOML, an unknown key (with the nearest known one) or a wrong value; names file and
            key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    folder = path.resolve().parent
    if table.get("target") == EMBEDDED:
        del table["target"]
    # What is not a list is refused with its key in fill.
    if isinstance(table.get("drafts"), list):
        table["drafts"] = [_draft_paths(d, folder) if isinstance(d, str) else d for d in table["drafts"]]
    if isinstance(table.get("lengths"), list):
        table["lengths"] = [str(n) if type(n) is int else n for n in table["lengths"]]

    serving = table.get("serving")
    if isinstance(serving, dict) and isinstance(serving.get("url"), str):
        serving["url"] = [serving["url"]]
    if isinstance(table.get("storage"), str) and "://" not in table["storage"]:
        table["storage"] = absolute(table["storage"], folder)

    def read_path(value: object, where: str) -> Path:
        return Path(absolute(convert(value, Path, where), folder))

    def read_workload(value: object, where: str) -> WorkloadSource:
        if isinstance(value, str):
            try:
                source = WorkloadSource.parse(value)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
        elif isinstance(value, Mapping):
            source = fill(WorkloadSource, value, where)
        else:
            raise InputError(f"{where} must be a table or text, not {shown(value)}")
        return dataclasses.replace(source, source=_workload_path(source.source, folder))

    config = fill(TuneConfig, table, str(path), special={Path: read_path, WorkloadSource: read_workload})
    object.__setattr__(config, "path", path)
    return config


def check_name(registry: Registry, spec: str) -> None:
    """Raises :class:`InputError` if ``spec`` begins with no known name. Nothing is imported, so options stay
    unchecked until the strategy is made.
    """
    name = (draft_spec(spec) if registry is STRATEGIES else spec).partition(":")[0]
    if name not in registry.names() and not (registry is LENGTHS and spec.isdecimal()):
        raise registry.unknown(name)


def _draft_paths(spec: str, folder: Path) -> str:
    """Option values that are paths, made absolute: folders of drafts, values with a slash in them, and those that name
    something there.
    """
    name, _, options = spec.partition(":")
    if not options:
        return absolute(spec, folder) if name not in STRATEGIES.names() and (folder / spec).is_dir() else spec
    parts = []
    for part, key, value in split_options(options):
        is_folder = key == "path" or (key is None and name in FOLDER_FIRST)
        relative = value not in embedded.DRAFTS and (is_folder or "/" in value or (folder / value).exists())
        if relative:
            part = absolute(value, folder) if key is None else f"{key}={absolute(value, folder)}"
        parts.append(part)
    return f"{name}:{','.join(parts)}"


def _workload_path(source: str, folder: Path) -> str:
    """A file or folder, made absolute; embedded names and data sets of the local cache stay as they are."""
    path = Path(absolute(source, folder))
    is_path = path.exists() or path.suffix.lower() in SUFFIXES or source.startswith((".", "~"))
    return str(path) if is_path and source not in workload_files() else source


def absolute(path: str | Path, folder: Path) -> str:
    # Not resolve: a link keeps the name that the user gave it.
    return os.path.normpath(folder / Path(path).expanduser())
