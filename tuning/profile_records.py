"""The parts of a profile: every field with its description, from which docs/profile.md follows."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
#: Low and high end.
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class ProfileRecord(BaseModel):
    """Part of a profile. Its fields can also be read by the names that they have in a file: ``row["speedup"]``."""

    model_config = ConfigDict(extra="allow")

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, self._attribute(name))

    def get(self, name: str, default: T | None = None) -> Any | T | None:
        """The field called so in a file; ``default`` where it is not told."""
        attribute = self._attribute(name)
        return getattr(self, attribute) if attribute in self.model_fields_set else default

    def __contains__(self, name: str) -> bool:
        """Whether a file tells the field."""
        return self._attribute(name) in self.model_fields_set

    @classmethod
    def _attribute(cls, name: str) -> str:
        return next((key for key, field in cls.model_fields.items() if field.alias == name), name)

    def to_dict(self) -> dict[str, Any]:
        """As it is written: what is not told is left out."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class ConfigurationRecord(ProfileRecord):
    """A way of decoding."""

    draft: str = Field(description="Strategy; empty for plain decoding.")
    length: str = Field(description="Draft length: a number, or a rule with its options. `0` is plain decoding.")
    segments: bool = Field(description="The verify pass is cut between layers.")
    verification: Literal["token", "block"] = Field(
        description="When sampling: drafted tokens are judged one by one, or as a block."
    )
    label: str = Field(description="The same in words.")


class AcceptanceCurve(ProfileRecord):
    """How often the tokens of a draft are accepted."""

    by_position: list[float] = Field(
        description="Accepted at position 1, 2, ..., of the steps that drafted that position (unconditional: "
        "all before it were accepted too)."
    )
    interval_90: list[list[float]] = Field(description="90 % interval of each (Wilson).")
    steps: int = Field(description="Steps that drafted at least one token.")


class SettingsRecord(ProfileRecord):
    """What the command was asked for."""

    longest: int | None = Field(None, description="Largest draft length K that was considered.")
    prompts: int | None = Field(None, description="Number of prompts.")
    max_new_tokens: int | None = Field(None, description="Tokens generated for each prompt.")
    trials: int | None = Field(None, description="Most configurations that are measured.")
    seconds: float | None = Field(None, description="Time limit of the trials in seconds; null is none.")
    repeats: int | None = Field(None, description="Times that a trial decodes each prompt.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_k: int | None = Field(None, description="Sample from the k likeliest tokens only.")
    top_p: float | None = Field(None, description="Sample from the smallest set with this probability.")
    seed: int | None = Field(None, description="Seed of sampling and of the order of runs.")
    more_prompts: int | None = Field(
        None,
        description="At most this many extra prompts, for an answer that the first ones leave inside the "
        "noise; 0: never, null: as many as `prompts`.",
    )
    keep_going: bool | None = Field(None, description="Trials go on although no untried configuration can win.")


class DraftRecord(ProfileRecord):
    """A draft."""

    name: str = Field(description="Name of the folder.")
    path: str | None = Field(None, description="Folder; null for a model object.")
    fingerprint: str | None = Field(
        None,
        description="Folder, and name, size and time of each weight file: tells checkpoints apart without "
        "reading them.",
    )
    dtype: str | None = Field(None, description="Type of the weights; null if an engine chose it.")
    model_type: str | None = Field(None, description="As in config.json.")
    parameters: int | None = Field(None, description="Number of parameters.")
    layers: dict[str, Any] | None = Field(None, description="How many layers of each type.")
    rollback: str | None = Field(
        None, description="How rejected tokens were taken back: `tape`, `slots` or `recompute`."
    )
    compiled: bool | None = Field(
        None, description="Decode and verify passes ran as compiled programs; false where it is not told."
    )
    packed: bool | None = Field(
        None, description="Short passes ran on packed copies of the weights; false where it is not told."
    )


class ModelRecord(DraftRecord):
    """The target."""

    path: str | None = Field(description="Folder; null for a model object.")
    fingerprint: str = Field(
        description="Folder, and name, size and time of each weight file: tells checkpoints apart without reading them."
    )
    dtype: str | None = Field(description="Type of the weights; null if an engine chose it.")


class ServerRecord(ProfileRecord):
    """What one server showed."""

    k: int | None = Field(None, description="Of the server; 0 without speculation.")
    step_seconds: float | None = Field(None, description="Seconds of a step.")
    acceptance_length: float | None = Field(None, description="Tokens per step.")
    tokens_per_second: float | None = Field(None, description="Of all requests together.")
    drafts: int | None = Field(None, description="Sequences that were drafted for, summed over steps.")
    draft_tokens: int | None = Field(None, description="Drafted tokens.")
    accepted_by_position: list[Any] | None = Field(None, description="Accepted tokens at position 1, 2, ...")


class LengthRecord(ProfileRecord):
    """What is known of one K."""

    acceptance_length: float | None = Field(None, description="Tokens per step with this K.")
    breaks_even_below: float | None = Field(
        None,
        description="Share of the largest K's step time below which a step of this K gives more tokens per second.",
    )
    predicted: float | None = Field(
        None, description="Speed-up by a straight line of step times over K; null with one server."
    )


class ConcurrencyRecord(ProfileRecord):
    """What is best at one number of requests at a time."""

    k: int = Field(ge=0, description="Best draft length here; 0 is plain decoding.")
    draft: str | None = Field(description="One draft for all numbers of requests; null for plain decoding.")
    length: str | None = Field(None, description="Its draft-length rule.")
    speedup: float | None = Field(description="Over plain decoding at this number of requests; null if not known.")
    interval_90: Interval | None = Field(description="90 % interval of the speed-up.")
    acceptance: AcceptanceCurve | None = Field(description="Of the draft, as the survey saw it.")
    acceptance_length: float | None = Field(description="Tokens per step, the target's own included.")
    tokens_per_second: float | None = Field(description="Of all requests together.")
    predicted: float | None = Field(description="Speed-up by the cost model.")
    reason: str = Field(description="Why this and not another.")
    faster: dict[str, Any] | None = Field(
        None,
        description="Another draft that is faster here, with its `draft`, `k`, `speedup`, `interval_90`, "
        "`acceptance_length` and `tokens_per_second`.",
    )
    measured: list[ServerRecord] | None = Field(None, description="Backend `server`: what each server showed.")
    by_k: dict[str, LengthRecord] | None = Field(
        None, description="Backend `server`: for each K what is known or would have to hold for it to be best."
    )
    warnings: list[str] | None = Field(None, description="Backend `server`: why numbers may mislead.")


class CostRecord(ProfileRecord):
    """What a step costs, from the survey."""

    target_step_seconds: float = Field(description="Seconds of one plain step.")
    draft_ratio: dict[str, float] = Field(description="c of each draft: seconds of one drafted token / plain step.")
    verify_ratio_by_k: list[float] = Field(
        description="v(K) for K = 0, 1, ...: target pass over K + 1 tokens / plain step."
    )
    rollback_ratio: dict[str, float] = Field(description="Commit and rollback of each draft's steps / plain step.")


class PredictedRecord(ConfigurationRecord):
    """A configuration and what the cost model expects of it."""

    speedup: float = Field(description="By the cost model.")


class TrialRecord(ConfigurationRecord):
    """A configuration that was measured."""

    pruned: bool = Field(description="Stopped early: it could not catch up with the best.")
    speedup: float | None = Field(None, description="As above.")
    interval: list[float] | None = Field(None, description="90 % interval.")
    acceptance_by_position: list[float] | None = Field(None, description="Of this trial's own steps.")
    prompts: int | None = Field(None, description="Number of prompts.")
    cpu_speedup: float | None = Field(None, description="By CPU time.")
    acceptance_rate: float | None = Field(None, description="Accepted / drafted tokens.")
    acceptance_length: float | None = Field(None, description="Tokens per step.")
    draft_length: float | None = Field(None, description="Drafted tokens per step.")
    draft_cost: float | None = Field(None, description="Seconds of one drafted token / plain token.")
    ideal_speedup: float | None = Field(None, description="Without any overhead of the loop.")
    efficiency: float | None = Field(None, description="Measured / ideal.")
    tokens: int | None = Field(None, description="Tokens generated.")
    plain_tokens_per_second: float | None = Field(None, description="Of plain decoding in the same rounds.")
    tokens_per_second: float | None = Field(None, description="Of this configuration.")


class VllmSetting(ProfileRecord):
    """How vLLM serves the choice, or why it cannot."""

    version: str | None = Field(None, description="Version of vLLM that the keys are for.")
    speculative_config: dict[str, Any] | None = Field(None, description="Value of --speculative-config.")
    additional_config: dict[str, Any] | None = Field(
        None, description="Value of --additional-config; settings of hybridspec's proposer."
    )
    environment: dict[str, Any] | None = Field(None, description="Environment variables.")
    engine_arguments: dict[str, Any] | None = Field(None, description="Engine arguments by vLLM's names.")
    refused: str | None = Field(None, description="Instead of all others: why vLLM cannot serve it, and what works.")


class WorkloadProfile(ProfileRecord):
    """One workload: the answer, and what it rests on."""

    settings: SettingsRecord = Field(description="What this workload ran with.")
    complete: bool = Field(description="False if it was interrupted.")
    stopped: str | None = Field(description="Why no more was measured; null if more would be.")
    chosen: ConfigurationRecord | None = Field(
        description="The configuration to use; null as long as nothing was measured."
    )
    reason: str | None = Field(description="Why this one and not another.")
    best_k: int | None = Field(ge=0, description="Most tokens that it drafts at once; 0 for plain decoding.")
    speedup: float | None = Field(
        description="Time per token of plain decoding over that of the chosen configuration, same prompts, "
        "measured in turn; 1 for plain decoding."
    )
    speedup_interval_90: Interval | None = Field(
        None, description="90 % interval, bootstrap over prompts; null for plain decoding."
    )
    cpu_speedup: float | None = Field(None, description="The same by CPU time, which other processes disturb less.")
    acceptance_rate: float | None = Field(None, description="Accepted / drafted tokens.")
    acceptance_length: float | None = Field(None, description="Tokens per step, the target's own included.")
    ideal_speedup: float | None = Field(
        None, description="What acceptance and step costs alone would allow, without any overhead of the loop."
    )
    efficiency: float | None = Field(None, description="Measured over ideal speed-up.")
    prediction_error_median: float | None = Field(
        None, description="Median of |predicted / measured - 1| over the measured configurations."
    )
    acceptance: dict[str, AcceptanceCurve] = Field(description="Of each draft, as the survey at the largest K saw it.")
    costs: CostRecord | None = Field(description="What a step costs, from the survey; see the cost model.")
    predicted: list[PredictedRecord] = Field(description="Every configuration with its predicted speed-up.")
    trials: list[TrialRecord] = Field(
        description="Every configuration that was measured; one that was stopped early (`pruned`) has no numbers."
    )
    by_concurrency: dict[str, ConcurrencyRecord] | None = Field(
        description="Backends `vllm` and `server`: the best K for each number of requests at a time; null otherwise."
    )
    vllm: VllmSetting | None = Field(
        description="How to serve the choice; null where plain decoding wins or the models are no folders."
    )


class MachineRecord(ProfileRecord):
    """The machine and its libraries."""

    system: str | None = Field(None, description="Operating system.")
    processor: str | None = Field(None, description="Its name, as far as the system tells.")
    cores: int | None = Field(None, description="Number of CPU cores.")
    threads: int | None = Field(None, description="CPU threads that torch used.")
    load_average: float | None = Field(
        None,
        description="Processes that were waiting for a core, averaged over a minute, when the profile was written.",
    )
    torch: str | None = Field(None, description="Version of torch.")
    transformers: str | None = Field(None, description="Version of transformers.")


class EngineRecord(ProfileRecord):
    """The engine that ran the models."""

    version: str | None = Field(None, description="Version of vLLM; null if a server does not tell.")
    python: str | None = Field(None, description="Backend `vllm`: the interpreter that has it.")
    device: str | None = Field(None, description="Backend `vllm`: `gpu` or `cpu`.")
    urls: dict[str, Any] | None = Field(None, description="Backend `server`: address of each server by its K.")
