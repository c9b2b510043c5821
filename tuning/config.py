"""What a tuning run depends on: every setting once, with its default and its description.

The command line takes its options from here, a file its keys, and a study its settings.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from hybridspec.errors import InputError
from hybridspec.runtime.options import LoadOptions, RollbackMode
from hybridspec.specs import LENGTHS, STRATEGIES, Registry, draft_spec
from hybridspec.tuning.validation import Flag, Folder, Number, Settings, Text, Whole, underscored
from hybridspec.tuning.workloads.sources import WorkloadSource

BackendName = Literal["torch", "vllm", "server"]
DType = Literal["float32", "bfloat16", "float16"]
#: What the embedded target is tuned with when nothing is named.
EMBEDDED_DRAFTS = ("same-architecture:draft-2-layers", "prompt-lookup")
RULES = ("expected-gain", "svip")
#: Engines and servers take minutes where the runner takes seconds: fewer trials, and no limit unless one is set.
TRIALS, ENGINE_TRIALS, SECONDS = 6, 3, 30.0


class MeasurementSettings(Settings):
    """What changes the meaning of a measurement."""

    # Profiles and studies have called it so from the first version on.
    max_k: Whole = Field(8, ge=1, serialization_alias="longest", description="Longest draft length to consider.")
    prompts: Whole = Field(4, ge=1, description="Prompts per workload.")
    more_prompts: Whole | None = Field(
        None,
        ge=0,
        description="At most this many extra prompts, measured only where a gain worth having lies inside the noise; "
        "0: never. Default: as many as --prompts.",
    )
    max_new_tokens: Whole = Field(48, ge=2, description="Tokens generated per prompt.")
    repeats: Whole = Field(1, ge=1, description="Times that each trial decodes each prompt.")
    temperature: Number = Field(0.0, ge=0, description="0, the default, is greedy.")
    top_k: Whole | None = Field(None, ge=1, description="Sample from the k likeliest tokens only.")
    top_p: Number | None = Field(None, description="Sample from the smallest set with this probability.")
    seed: Whole = Field(0, ge=0, le=2**63 - 1, description="Seed of sampling.")
    keep_going: Flag = Field(False, description="Use up trials and time, even when nothing untried can win.")

    @field_validator("top_p")
    @classmethod
    def _share(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"must lie above 0 and up to 1, not {value}")
        return value


class StudySettings(MeasurementSettings):
    """What a study depends on, beside the models; part of its identity in the storage.

    Attributes:
        trials, seconds: budgets per workload, the survey not counted; the first two trials run whatever they take.
            Trials are configurations: the further prompts of one do not count as another.
    """

    trials: Whole = Field(TRIALS, ge=1)
    seconds: Number | None = SECONDS

    @property
    def reserve(self) -> int:
        """Further prompts for an answer that ``prompts`` leave inside the noise."""
        return self.prompts if self.more_prompts is None else self.more_prompts

    def replaced(self, **values: object) -> "StudySettings":
        """With other values, which are known to be right."""
        return self.model_copy(update=values)

    def to_dict(self) -> dict[str, Any]:
        """As profiles hold it."""
        return self.model_dump(by_alias=True)

    def identity(self) -> dict[str, Any]:
        """The settings that change what a measurement means; budgets may differ between sittings."""
        return self.model_dump(by_alias=True, exclude={"trials", "seconds", "keep_going"})


class ServingOptions(BaseModel):
    """How vLLM serves the target; what is None is left to vLLM.

    Attributes:
        url: of running OpenAI-compatible servers, for the ``server`` backend: one, or a list of several that serve one
            target with other K or none.
        concurrency: numbers of requests at a time for which K is chosen.
        engine: further engine arguments, by vLLM's own names, handed over as they are.

    The others are engine arguments of vLLM under their own names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[tuple[Text, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = ()
    concurrency: tuple[Whole, ...] = ()
    max_model_len: Whole | None = Field(None, ge=1)
    max_num_seqs: Whole | None = Field(None, ge=1)
    max_num_batched_tokens: Whole | None = Field(None, ge=1)
    tensor_parallel_size: Whole | None = Field(None, ge=1)
    gpu_memory_utilization: Number | None = None
    enable_prefix_caching: Flag | None = None
    enable_chunked_prefill: Flag | None = None
    enable_expert_parallel: Flag | None = None
    enforce_eager: Flag | None = None
    kv_cache_dtype: Text | None = None
    trust_remote_code: Flag | None = None
    engine: dict[str, Any] = Field(default_factory=dict)

    _underscored = model_validator(mode="before")(underscored)

    @model_validator(mode="after")
    def _whole(self) -> "ServingOptions":
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must lie above 0 and up to 1, not {share}")
        if any(c < 1 for c in self.concurrency):
            raise ValueError(f"concurrency must be at least 1, not {min(self.concurrency)}")
        if "speculative_config" in self.engine:
            raise ValueError("engine.speculative_config is what is to be found: leave it out")
        if twice := next((name for name in self.engine if name in type(self).model_fields), None):
            raise ValueError(f"engine.{twice}: write {twice} in [serving] itself")
        return self

    def engine_arguments(self) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM``, without model and dtype."""
        own = self.model_dump(exclude={"url", "concurrency", "engine"}, exclude_none=True)
        return {**own, **self.engine}


def _workload(value: object) -> object:
    """A workload may be written as ``--workload`` takes it."""
    if isinstance(value, str):
        try:
            return WorkloadSource.parse(value)
        except InputError as error:
            raise ValueError(str(error)) from None
    if not isinstance(value, Mapping | WorkloadSource):
        raise ValueError(f"must be a table or text, not {value!r}")
    return underscored(value)


class TuneConfig(MeasurementSettings):
    """Everything that a tuning run depends on; plain values, so that it can be sent to another process."""

    target: Folder | None = Field(None, description="Checkpoint folder of the target. Default: the embedded one.")
    drafts: tuple[Text, ...] = Field((), description="Checkpoint folder or draft strategy; repeat for several.")
    lengths: tuple[Annotated[Text, BeforeValidator(lambda v: str(v) if type(v) is int else v)], ...] = Field(
        (),
        description="Draft-length rule beside every fixed K; repeat. fixed: no other. Default: expected-gain, svip.",
    )
    segments: Flag = Field(False, description="Consider segmented verification too.")
    workloads: tuple[Annotated[WorkloadSource, BeforeValidator(_workload)], ...] = ()
    trials: Whole | None = Field(
        None,
        ge=1,
        description=f"Configurations to measure per workload at most. Default: {TRIALS}; vllm: {ENGINE_TRIALS}.",
    )
    seconds: Number | None = Field(
        None,
        ge=0,
        description=f"Time limit of a workload's trials; 0: none. Default: {SECONDS:.0f}; vllm: none.",
    )
    workers: Whole = Field(1, ge=1, description="Processes that share the work; mind the cores.")
    storage: Text | None = Field(
        None, description="Optuna storage URL, or path of a journal file; default: a SQLite file in --out."
    )
    backend: BackendName = Field("torch", description="torch, vllm or server.")
    python: Text | None = Field(None, description="Interpreter that has vLLM, for --backend vllm. Default: this one.")
    threads: Whole = Field(1, ge=1, description="CPU threads; small models run best on one.")
    rollback: RollbackMode = Field(
        "auto", description="tape, slots, recompute, or auto (the default: tape where known)."
    )
    dtype: DType | None = None
    device: Text = "cpu"
    compile: Flag = False
    packed: Flag = False
    out: Folder = Field(Path("hybridspec-tune"), description="Folder of study, profile and vLLM settings.")
    serving: ServingOptions = ServingOptions()
    _path: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _whole(self) -> "TuneConfig":
        for registry, specs in ((STRATEGIES, self.drafts), (LENGTHS, self.lengths)):
            for spec in specs:
                _check_name(registry, spec)
        names = [w.name or Path(w.source).stem for w in self.workloads]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two workloads are called {twice!r}: give one another name")
        if self.target is not None and not self.drafts and self.backend == "torch":
            raise ValueError("drafts is missing: the embedded draft fits the embedded target only")
        for name in ("compile", "packed"):
            if getattr(self, name) and self.backend != "torch":
                raise ValueError(
                    f"{name} is for backend torch, this package's own runner, and the backend is {self.backend}: leave "
                    f"it out (--{name})"
                )
        if self.backend == "server" and not self.serving.url:
            raise ValueError(
                'serving.url is missing: backend = "server" needs the address of the running server (--url)'
            )
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TuneConfig) and self.model_dump() == other.model_dump()

    @property
    def path(self) -> Path | None:
        """The file that this was read from."""
        return self._path

    def override(self, **flags: object) -> "TuneConfig":
        """With the flags that were given in place of what the file says; flags that are None or empty were not.

        Raises:
            InputError: a flag is wrong, or they do not go together.
        """
        given = {name: v for name, v in flags.items() if v is not None and v is not False and v != [] and v != ()}
        said = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**said | given).read_from(self._path)

    def read_from(self, path: Path | None) -> "TuneConfig":
        """The same, with the file that it comes from."""
        self._path = path
        return self

    @property
    def settings(self) -> StudySettings:
        """Those of a study, before a workload has its say."""
        shared = {name: getattr(self, name) for name in MeasurementSettings.model_fields}
        engine = self.backend != "torch"
        trials = self.trials or (ENGINE_TRIALS if engine else TRIALS)
        seconds = (None if engine else SECONDS) if self.seconds is None else self.seconds or None
        return StudySettings(**shared, trials=trials, seconds=seconds)

    @property
    def draft_specs(self) -> tuple[str, ...]:
        """Drafts by their full names; those of the embedded target where nothing is named."""
        if not self.drafts and self.target is None:
            return EMBEDDED_DRAFTS
        return tuple(map(draft_spec, self.drafts))

    @property
    def rules(self) -> tuple[str, ...]:
        """Draft-length rules beside every fixed K."""
        if not self.lengths:
            return RULES if self.backend == "torch" else ()
        return tuple(spec for spec in self.lengths if spec != "fixed")

    @property
    def load(self) -> LoadOptions:
        """How target and drafts are loaded."""
        return LoadOptions(self.dtype or "float32", self.device, self.rollback, self.compile, self.packed)

    @property
    def engine(self) -> ServingOptions:
        """How vLLM serves the target, with the type of the weights."""
        if self.dtype is None:
            return self.serving
        return self.serving.model_copy(update={"engine": {"dtype": self.dtype, **self.serving.engine}})

    @property
    def interpreter(self) -> str:
        """The one that has vLLM."""
        return self.python or sys.executable


def _check_name(registry: Registry, spec: str) -> None:
    """Raises :class:`ValueError` if ``spec`` begins with no known name. Nothing is imported, so options stay unchecked
    until the strategy is made.
    """
    name = (draft_spec(spec) if registry is STRATEGIES else spec).partition(":")[0]
    if name not in registry.names() and not (registry is LENGTHS and spec.isdecimal()):
        raise ValueError(str(registry.unknown(name)))
