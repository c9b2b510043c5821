"""The study's backend on an offline vLLM engine in a child process.

Plain decoding and each draft at the largest K are timed; a K between is predicted: acceptance by position is that of
the largest K, and a step takes as long as lies on the straight line between a plain step and one of the largest K.
Engines run one after the other, as two do not fit into the memory of one device: pairs are rounds of the same prompts,
not of the same minute.
"""

from collections.abc import Callable, Sequence

from hybridspec.errors import InputError
from hybridspec.tuning.backends.base import Backend, DraftSurvey, Progress, Sample, Survey
from hybridspec.tuning.backends.engine_runs import EngineRuns
from hybridspec.tuning.backends.request_loads import Load, Pooled, paired
from hybridspec.tuning.configuration import PLAIN, Configuration


class VllmBackend(Backend):
    """One load on the engines that ``runs`` starts."""

    name = "vllm"

    def __init__(self, runs: EngineRuns, load: Load) -> None:
        self.runs, self.load = runs, load

    def survey(self, configurations: Sequence[Configuration], progress: Progress) -> Survey:
        longest = self.load.settings.max_k
        plain = self._pooled(PLAIN, progress)
        drafts = dict.fromkeys(c.draft for c in configurations if not c.plain)
        most = {draft: self._pooled(Configuration(draft, str(longest)), progress) for draft in drafts}
        return survey_of(plain, most, longest, configurations, self.load.concurrency)

    def measure(
        self, configuration: Configuration, on_sample: Callable[[int, Sample], None], more: bool = False
    ) -> list[Sample]:
        # All rounds are over when the answer is there: nothing is left to prune.
        rounds = [self.runs.rounds(c, self.load, self.progress) for c in (PLAIN, configuration)]
        return paired(self.load.labels, *rounds)

    def _pooled(self, configuration: Configuration, progress: Progress) -> Pooled:
        pooled = Pooled.of(self.runs.rounds(configuration, self.load, progress))
        if not pooled.rows:
            raise InputError(
                f"workload {self.load.workload}: nothing was generated after the first tokens at "
                f"{self.load.concurrency} requests at a time. Raise --max-new-tokens, or choose other prompts."
            )
        return pooled


def survey_of(
    plain: Pooled,
    most: dict[str, Pooled],
    longest: int,
    configurations: Sequence[Configuration],
    concurrency: int = 1,
) -> Survey:
    """From plain decoding and each draft at the largest K.

    Drafting and verifying are not told apart: what each drafted token adds to a step counts as the draft's cost.
    """
    drafts = {}
    for draft, pooled in most.items():
        cost = (pooled.row_seconds / plain.row_seconds - 1) / longest
        drafts[draft] = DraftSurvey.of(pooled.counts, cost)
    predicted = {PLAIN: 1.0}
    for draft, pooled in most.items():
        fixed = {k: pooled.acceptance_length(k) / (1 + k * drafts[draft].cost) for k in range(1, longest + 1)}
        for c in configurations:
            if c.draft == draft and not c.plain:
                # A rule can do better than the best fixed K, by how much is not known.
                predicted[c] = fixed[int(c.length)] if c.length.isdecimal() else max(fixed.values())
    ratios = [1.0] * (longest + 1)
    return Survey(plain.row_seconds * concurrency, ratios, dict.fromkeys(most, 0.0), drafts, predicted)
