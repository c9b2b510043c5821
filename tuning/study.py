"""The Optuna study of one workload: which draft length wins, by paired measurement, resumable.

Every finished trial keeps what it measured as user attributes, so that a profile can be rebuilt from the storage alone.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DatabaseError

from hybridspec.decoder import Statistics, check_length
from hybridspec.drafts.base import Draft
from hybridspec.errors import HybridspecError, InputError
from hybridspec.runner import TargetRunner
from hybridspec.sampling import Sampling
from hybridspec.tuning.cost_model import Costs, ideal_speedup, measure_costs, predicted_speedup
from hybridspec.tuning.trial import PreparedPrompt, measure_pair, speedup, speedup_interval
from hybridspec.tuning.workloads import Prompt, Workload


@dataclass(frozen=True)
class Settings:
    """What a study depends on, beside the models; part of its identity in the storage."""

    longest: int = 8
    prompts: int = 4
    max_new_tokens: int = 64
    trials: int = 5
    seconds: float | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("longest", 1), ("prompts", 1), ("max_new_tokens", 2), ("trials", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    def identity(self) -> dict[str, object]:
        """The settings that change what a measurement means; budgets may differ between sittings."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("trials", "seconds")}


@dataclass(frozen=True)
class Measurement:
    """One draft length on one workload."""

    k: int
    speedup: float
    interval: tuple[float, float]
    cpu_speedup: float
    acceptance_rate: float | None
    acceptance_length: float
    acceptance_by_position: list[float]
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class WorkloadResult:
    """Everything known about a workload so far; the winner is the best draft length whose interval lies above 1, else
    0.
    """

    name: str
    costs: Costs | None
    measurements: dict[int, Measurement]
    predicted: dict[int, float]
    complete: bool

    @property
    def best(self) -> Measurement | None:
        gaining = [m for m in self.measurements.values() if m.k and m.interval[0] > 1.0]
        return max(gaining, key=lambda m: m.speedup) if gaining else self.measurements.get(0)

    @property
    def best_k(self) -> int | None:
        return self.best.k if self.best else (0 if self.complete else None)

    @property
    def ideal(self) -> float | None:
        """Ideal speed-up of the winner from its own acceptance length and the measured costs."""
        best = self.best
        return ideal_speedup(best.acceptance_length, self.costs, best.k) if best and self.costs else None

    @property
    def efficiency(self) -> float | None:
        """Measured / ideal speed-up of the winner: the loop's own overhead."""
        return self.best.speedup / self.ideal if self.ideal else None


def open_storage(out: Path) -> str:
    """Optuna storage URL of the study file in ``out``.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise InputError(f"--out {out}: this folder is not writable. Choose another.")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return f"sqlite:///{out / 'study.db'}"


class WorkloadStudy:
    """Measures draft lengths on one workload until the trials or the time are used up.

    Order: the longest K first (its acceptance by position and the step costs predict all others), then plain decoding
        against itself (the noise of this machine), then the lengths with the best predictions.
    """

    def __init__(
        self, target: TargetRunner, draft: Draft, workload: Workload, settings: Settings, storage: str, pair_name: str
    ) -> None:
        self.target, self.draft, self.workload, self.settings = target, draft, workload, settings
        self.prompts = choose_prompts(workload.prompts, settings.prompts)
        identity = json.dumps([pair_name, [(p.id, p.text) for p in self.prompts], settings.identity()])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        try:
            self.study = optuna.create_study(
                study_name=f"{workload.name}-{digest}",
                storage=storage,
                direction="maximize",
                sampler=optuna.samplers.TPESampler(seed=settings.seed),
                load_if_exists=True,
            )
        except (DatabaseError, optuna.exceptions.StorageInternalError) as error:
            raise InputError(
                f"{storage.removeprefix('sqlite:///')}: not a readable Optuna study ({error}). "
                "Move it away, or choose another --out."
            ) from error
        self._discard_interrupted()
        self.encoded = [target.encode(p.text) for p in self.prompts]

    def check(self) -> None:
        """Raises before any measurement if a prompt, its output and the longest block do not fit into the context."""
        for prompt, tokens in zip(self.prompts, self.encoded, strict=True):
            try:
                check_length(self.target, tokens, self.settings.max_new_tokens, self.settings.longest)
            except HybridspecError as error:
                raise type(error)(f"workload {self.workload.name}, prompt {prompt.id}: {error}") from error

    def run(self, progress: Callable[[str, float], None] = lambda *_: None) -> WorkloadResult:
        """Runs the trials that are missing. ``progress(text, share done)``. An interrupt keeps every finished trial."""
        begun = time.monotonic()
        if not self._unmeasured() or len(self._finished()) >= self.settings.trials:
            return self.result()
        with self._prepared(progress) as prompts:
            if self.result().costs is None:
                costs = measure_costs(prompts[0], self.settings.longest)
                self.study.set_user_attr("costs", dataclasses.asdict(costs))
            while (k := self._next_k()) is not None:
                if not self._has_time(begun):
                    break
                self._trial(k, prompts, progress)
        return self.result()

    def result(self) -> WorkloadResult:
        """What the storage knows, without measuring anything."""
        finished = self._finished()
        measurements = {}
        for trial in finished:
            row = dict(trial.user_attrs["measurement"])
            measurements[row["k"]] = Measurement(**{**row, "interval": tuple(row["interval"])})
        stored = self.study.user_attrs.get("costs")
        costs = Costs(**{**stored, "verify": tuple(stored["verify"])}) if stored else None
        predicted = {}
        if costs and self.settings.longest in measurements:
            acceptance = measurements[self.settings.longest].acceptance_by_position
            predicted = {k: predicted_speedup(acceptance, costs, k) for k in range(len(acceptance) + 1)}
        return WorkloadResult(self.workload.name, costs, measurements, predicted, len(measurements) >= 3)

    def _trial(self, k: int, prompts: Sequence[PreparedPrompt], progress: Callable[[str, float], None]) -> None:
        self.study.enqueue_trial({"k": k})
        trial = self.study.ask()
        trial.suggest_int("k", 0, self.settings.longest)
        try:
            pairs = []
            for i, prompt in enumerate(prompts):
                done = (len(self._finished()) + i / len(prompts)) / self.settings.trials
                progress(f"K = {k}, prompt {i + 1} of {len(prompts)}", done)
                pairs.append(
                    measure_pair(
                        prompt, k, self.settings.max_new_tokens, speculative_first=bool((i + trial.number) % 2)
                    )
                )
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        measurement = summarise(k, pairs)
        trial.set_user_attr("measurement", dataclasses.asdict(measurement))
        self.study.tell(trial, measurement.speedup)

    def _next_k(self) -> int | None:
        """The next draft length worth measuring, or None when the trials are used up."""
        unmeasured = self._unmeasured()
        if not unmeasured or len(self._finished()) >= self.settings.trials:
            return None
        result = self.result()
        if self.settings.longest in unmeasured:
            return self.settings.longest
        best = max(unmeasured, key=lambda k: result.predicted.get(k, 0.0))
        # The predicted winner first: if time runs out after two trials, it is the one that matters.
        return 0 if 0 in unmeasured and len(result.measurements) >= 2 else best

    def _has_time(self, begun: float) -> bool:
        """True unless the time limit leaves no room for another trial; the first three always run, so that there is
        an answer.
        """
        limit, done = self.settings.seconds, len(self._finished())
        if limit is None or done < 3:
            return True
        elapsed = time.monotonic() - begun
        return elapsed + elapsed / done < limit

    def _finished(self) -> list[FrozenTrial]:
        return [
            t
            for t in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if "measurement" in t.user_attrs
        ]

    def _unmeasured(self) -> list[int]:
        measured = {t.user_attrs["measurement"]["k"] for t in self._finished()}
        return [k for k in range(self.settings.longest + 1) if k not in measured]

    def _discard_interrupted(self) -> None:
        """A killed process leaves its trial running for ever; close it, so that the sampler forgets it."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            self.study.tell(trial.number, state=TrialState.FAIL)

    @contextmanager
    def _prepared(self, progress: Callable[[str, float], None]) -> Iterator[list[PreparedPrompt]]:
        settings = self.settings
        with ExitStack() as stack:
            prepared = []
            for i, (prompt, tokens) in enumerate(zip(self.prompts, self.encoded, strict=True)):
                progress(f"prefill of prompt {i + 1} of {len(self.prompts)}", 0.0)
                one = PreparedPrompt(self.target, self.draft, prompt.id, tokens, settings.sampling, settings.seed + i)
                prepared.append(stack.enter_context(one))
            yield prepared


def summarise(k: int, pairs: Sequence) -> Measurement:
    """Pools the pairs of one trial."""
    statistics = Statistics([step for pair in pairs for step in pair.speculative.steps])
    tokens = sum(len(p.speculative.tokens) for p in pairs)
    return Measurement(
        k=k,
        speedup=speedup(pairs),
        interval=speedup_interval(pairs),
        cpu_speedup=speedup(pairs, "cpu_seconds"),
        acceptance_rate=statistics.acceptance_rate,
        acceptance_length=statistics.acceptance_length,
        acceptance_by_position=statistics.acceptance_by_position(),
        tokens=tokens,
        plain_tokens_per_second=sum(len(p.plain.tokens) for p in pairs) / sum(p.plain.wall_seconds for p in pairs),
        tokens_per_second=tokens / sum(p.speculative.wall_seconds for p in pairs),
    )
