"""The Optuna study of one workload: which configuration wins, by paired measurement, resumable and shared.

Every finished trial keeps what it measured as user attributes, and the study keeps its survey, so that a profile can be
rebuilt from the storage alone.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import DatabaseError

from hybridspec.decoding.draft import Draft
from hybridspec.drafts.registry import make_length, with_longest
from hybridspec.errors import InputError
from hybridspec.tuning.backends.base import Backend, DraftSurvey, Progress, Sample, Survey
from hybridspec.tuning.config import StudySettings
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.decision import (
    WORTHWHILE,
    Answer,
    corrected,
    decide,
    ratio,
    samples_table,
    shared_speedups,
    unsettled,
)
from hybridspec.tuning.measurement import Measurement, measurement_of
from hybridspec.tuning.storage import HINT, WORKER, close_abandoned, this_worker

#: Attribute of a trial on the further prompts.
MORE = "more"
#: How times are taken; trials of another method are not of one study.
METHOD = "in turn"
OPEN_OR_DONE = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)


def search_space(
    drafts: Sequence[str] | Mapping[str, Draft], lengths: Sequence[str], max_k: int, segments: bool = False
) -> list[Configuration]:
    """Plain decoding, and every draft with every K up to ``max_k`` and every rule in ``lengths``.

    A rule that looks at the draft's distributions is left out for a draft that has no doubts.
    """
    fixed = [str(k) for k in range(1, max_k + 1)]
    rules = [with_longest(rule, max_k) for rule in lengths]
    looking = {rule for rule in rules if make_length(rule).looks_at_drafts}
    sure = {d for d in drafts if isinstance(drafts, Mapping) and not drafts[d].has_doubts}
    cut = (False, True) if segments else (False,)
    pairs = [(d, r) for d in drafts for r in [*fixed, *rules] if not (d in sure and r in looking)]
    return [PLAIN, *(Configuration(d, r, s) for d, r in pairs for s in cut)]


@dataclass(frozen=True)
class WorkloadResult:
    """Everything known about a workload so far.

    ``stopped``: why no more is measured; None if more would be.
    """

    name: str
    settings: StudySettings
    survey: Survey | None
    samples: dict[Configuration, list[Sample]]
    pruned: tuple[Configuration, ...] = ()
    stopped: str | None = None
    measurements: dict[Configuration, Measurement] = field(default_factory=dict)

    @property
    def answer(self) -> Answer | None:
        """None as long as nothing was measured."""
        if not self.samples and self.pruned:
            labels = ", ".join(c.label for c in self.pruned)
            return Answer(PLAIN, f"all that was tried was more than 10 % slower on each of the first prompts: {labels}")
        return decide(self.samples)

    @property
    def best(self) -> Measurement | None:
        """The measurement of the answer; None for plain decoding."""
        return self.measurements.get(self.answer.configuration) if self.answer else None

    @property
    def prediction_errors(self) -> dict[Configuration, float]:
        """predicted / measured - 1 of each configuration that has both."""
        predicted = self.survey.predicted if self.survey else {}
        return {c: predicted[c] / m.speedup - 1 for c, m in self.measurements.items() if c in predicted and not c.plain}


class Pruned(Exception):
    """Raised inside a measurement that cannot win any more."""


class WorkloadStudy:
    """Measures configurations of one workload: the survey first, then those with the best predictions, until no untried
    one can win by more than 2 %, or a budget is used up.

    Args:
        identity: what tells this study apart in the storage beside the settings: models, prompts, machine settings.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        space: Sequence[Configuration],
        settings: StudySettings,
        storage: BaseStorage,
        identity: object,
    ) -> None:
        self.name, self.backend, self.space, self.settings = name, backend, list(space), settings
        text = json.dumps([identity, backend.name, settings.identity(), METHOD], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        try:
            self.study = optuna.create_study(
                study_name=f"{name}-{digest}",
                storage=storage,
                direction="maximize",
                sampler=optuna.samplers.RandomSampler(seed=settings.seed),
                load_if_exists=True,
            )
        except (DatabaseError, optuna.exceptions.StorageInternalError) as error:
            raise InputError(f"the storage is not a readable Optuna study ({error}).{HINT}") from error
        close_abandoned(self.study)

    def prepare(self, progress: Progress = lambda *_: None) -> None:
        """The survey, unless the storage has one: what several workers should not each do."""
        if self.result().survey is None:
            self.study.set_user_attr("survey", _survey_json(self.backend.survey(self.space, progress)))

    def run(self, progress: Progress = lambda *_: None) -> WorkloadResult:
        """Runs what is missing. An interrupt keeps the survey and every finished trial."""
        self.backend.progress = progress
        found = self.result()
        # Further prompts may be what an interrupt, or the time limit, has left undone.
        if self._stopped(found) is None or self._unmeasured_more(found):
            with self.backend:
                self.prepare(progress)
                begun, here = time.monotonic(), 0
                while True:
                    result = self.result()
                    elapsed = time.monotonic() - begun
                    stopped = self._stopped(result, elapsed, here)
                    if stopped is None:
                        self._trial(result, self._claim(result), progress)
                    elif not self._out_of_time(elapsed, here) and (claimed := self._claim_more(result)):
                        self._trial(result, claimed, progress)
                    else:
                        self.study.set_user_attr("stopped", stopped)
                        break
                    here += 1
        return self.result()

    def result(self) -> WorkloadResult:
        """What the storage knows, without measuring anything."""
        samples, pruned = {}, []
        for trial in self._trials(TrialState.COMPLETE, TrialState.PRUNED):
            configuration = _configuration(trial)
            samples.setdefault(configuration, []).extend(
                Sample(**{**s, "steps": tuple(map(tuple, s["steps"]))}) for s in trial.user_attrs["samples"]
            )
            if trial.state == TrialState.PRUNED:
                pruned.append(configuration)
        stored = self.study.user_attrs.get("survey")
        survey = _survey_from(stored, self.space) if stored else None
        measurements = {c: measurement_of(s) for c, s in samples.items() if c not in pruned}
        whole = {c: s for c, s in samples.items() if c not in pruned}
        stopped = self.study.user_attrs.get("stopped")
        return WorkloadResult(self.name, self.settings, survey, whole, tuple(pruned), stopped, measurements)

    def _stopped(self, result: WorkloadResult, elapsed: float = 0.0, here: int = 0) -> str | None:
        """Why the study is over, in words; None if it is not. ``here`` trials of this sitting took ``elapsed`` s."""
        if result.survey is None:
            return None
        done = len(result.samples) + len(result.pruned)
        tried = {*result.samples, *result.pruned, PLAIN, *self._running()}
        untried = [c for c in self.space if c not in tried]
        if not untried:
            return "every configuration was measured"
        if len(tried) > self.settings.trials:
            return f"the limit of {self.settings.trials} trials"
        if self._out_of_time(elapsed, here):
            return f"the time limit of {self.settings.seconds:.0f} s"
        if done and not self.settings.keep_going:
            best = _best(result)
            values, scatter = self._values(result)
            bound = max(values[c] for c in untried) * (1 + scatter)
            if bound <= best * (1 + WORTHWHILE):
                return f"no untried configuration can win by more than {WORTHWHILE:.0%}"
        return None

    def _out_of_time(self, elapsed: float, here: int) -> bool:
        """Whether another trial like the ``here`` so far would end behind the limit."""
        limit = self.settings.seconds
        return here >= 2 and limit is not None and elapsed * (here + 1) / here > limit

    def _values(self, result: WorkloadResult) -> tuple[dict[Configuration, float], float]:
        """Expected speed-up of every untried configuration; one without a prediction is as good as its uncut twin."""
        predicted = dict(result.survey.predicted)
        for c in self.space:
            if c not in predicted:
                predicted[c] = predicted.get(dataclasses.replace(c, segments=False), 1.0)
        return corrected(predicted, shared_speedups(result.samples))

    def _trial(self, result: WorkloadResult, claimed: tuple[Trial, Configuration] | None, progress: Progress) -> None:
        if claimed is None:
            # Another worker has the last of them.
            time.sleep(0.2)
            return
        trial, configuration = claimed
        more = trial.user_attrs.get(MORE, False)
        best = _best(result)
        done = len(result.samples) + len(result.pruned)
        seen: list[Sample] = []
        count = (self.backend.more if more else self.settings.prompts) * self.settings.repeats

        def on_sample(index: int, sample: Sample) -> None:
            seen.append(sample)
            share = (done + (index + 1) / count) / max(self.settings.trials, done + 1)
            progress(f"{configuration.label}, run {index + 1} of {count}", min(1.0, share))
            trial.report(float(ratio(samples_table(seen))), index)
            if not more and hopeless(seen, best, count):
                raise Pruned

        try:
            samples = self.backend.measure(configuration, on_sample, more)
        except Pruned:
            trial.set_user_attr("samples", [dataclasses.asdict(s) for s in seen])
            self.study.tell(trial, state=TrialState.PRUNED)
            return
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        trial.set_user_attr("samples", [dataclasses.asdict(s) for s in samples])
        self.study.tell(trial, float(ratio(samples_table(samples))))

    def _claim(self, result: WorkloadResult) -> tuple[Trial, Configuration] | None:
        """A trial of the best untried configuration that no other worker has taken."""
        values, _ = self._values(result)
        taken = {*result.samples, *result.pruned, PLAIN, *self._running()}
        order = sorted((c for c in self.space if c not in taken), key=lambda c: -values[c])
        return self._first_free(order)

    def _claim_more(self, result: WorkloadResult) -> tuple[Trial, Configuration] | None:
        """Likewise, for the further prompts of a configuration that they may settle."""
        return self._first_free(self._unmeasured_more(result), more=True)

    def _unmeasured_more(self, result: WorkloadResult) -> list[Configuration]:
        if not self.backend.more:
            return []
        measured = {_configuration(t) for t in self._trials(*OPEN_OR_DONE) if t.user_attrs.get(MORE)}
        return [c for c in unsettled(result.samples) if c not in measured]

    def _first_free(self, order: Sequence[Configuration], more: bool = False) -> tuple[Trial, Configuration] | None:
        """The queue is shared: what comes out of it may be what another worker has just put in."""
        for wanted in order:
            # From its first moment on: an unclaimed trial would count as abandoned.
            attributes = {"configuration": dataclasses.asdict(wanted), MORE: more, WORKER: this_worker()}
            self.study.enqueue_trial({"configuration": self.space.index(wanted)}, user_attrs=attributes)
            trial = self.study.ask()
            trial.suggest_int("configuration", 0, len(self.space) - 1)
            trial.set_user_attr(WORKER, this_worker())
            # Another worker has emptied the queue, or has an earlier trial of the same.
            if "configuration" not in trial.user_attrs or any(
                t.number < trial.number and _claims(t) == _claims(trial)
                for t in self._trials(TrialState.WAITING, *OPEN_OR_DONE)
            ):
                self.study.tell(trial, state=TrialState.FAIL)
                continue
            return trial, _configuration(trial)
        return None

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        needed = "configuration" if TrialState.RUNNING in states else "samples"
        return [t for t in self.study.get_trials(deepcopy=False, states=states) if needed in t.user_attrs]

    def _running(self) -> list[Configuration]:
        return [_configuration(t) for t in self._trials(TrialState.RUNNING)]


def _best(result: WorkloadResult) -> float:
    """The speed-up to beat, at least that of plain decoding."""
    return max([1.0, *shared_speedups(result.samples).values()])


def hopeless(samples: Sequence[Sample], best: float, count: int) -> bool:
    """Whether a configuration cannot catch up with ``best`` any more: after a third of the prompts, and at least two,
    even its best prompt so far lies 10 % below.
    """
    table = samples_table(samples)
    if len(samples) == count or len(table) < max(2, count // 3):
        return False
    return max(float(ratio(row[None])) for row in table) < 0.9 * best


def _claims(trial: Trial | FrozenTrial) -> tuple[Configuration, bool]:
    return _configuration(trial), trial.user_attrs.get(MORE, False)


def _configuration(trial: Trial | FrozenTrial) -> Configuration:
    return Configuration(**trial.user_attrs["configuration"])


def _survey_json(survey: Survey) -> dict:
    row = dataclasses.asdict(dataclasses.replace(survey, predicted={}))
    row["predicted"] = [[dataclasses.asdict(c), value] for c, value in survey.predicted.items()]
    return row


def _survey_from(row: dict, space: Sequence[Configuration]) -> Survey:
    drafts = {name: DraftSurvey(**d) for name, d in row["drafts"].items()}
    predicted = {Configuration(**c): value for c, value in row["predicted"]}
    return Survey(**{**row, "drafts": drafts, "predicted": {c: v for c, v in predicted.items() if c in set(space)}})
