"""The study's backend on our own runner: drafts and target in this process."""

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.tuning.backends.base import Backend, DraftSurvey, Progress, Sample, Survey
from hybridspec.tuning.configuration import Bench, Configuration
from hybridspec.tuning.cost_model import Costs, Place, Surveying, measure_verify, places, play
from hybridspec.tuning.timed_decoding import PreparedDecoding, PreparedPrompt, in_turn, measure_pair
from hybridspec.tuning.workloads.encoding import EncodedPrompt


class TorchBackend(Backend):
    """Keeps every prompt prefilled for plain decoding and for each draft that was used, so prefill is paid once.

    Args:
        more_prompts: for answers that ``prompts`` leave inside the noise.
    """

    name = "torch"

    def __init__(
        self,
        bench: Bench,
        prompts: Sequence[EncodedPrompt],
        *,
        more_prompts: Sequence[EncodedPrompt] = (),
        max_k: int,
        max_new_tokens: int,
        repeats: int = 1,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        self.bench, self.prompts = bench, [*prompts, *more_prompts]
        self.more, self.first = len(more_prompts), range(len(prompts))
        self.max_k, self.max_new_tokens, self.repeats = max_k, max_new_tokens, repeats
        self.sampling, self.seed = sampling, seed
        self._stack = ExitStack()
        self._prepared: dict[tuple[str | None, int], PreparedPrompt] = {}
        self._order = random.Random(seed)

    def __exit__(self, *_: object) -> None:
        self._prepared.clear()
        self._stack.close()

    def _prompt(self, draft: str | None, index: int) -> PreparedPrompt:
        """The prompt, prefilled on the target and, for a draft, on it too."""
        key = (draft, index)
        if key not in self._prepared:
            prompt = self.prompts[index]
            prepared = PreparedPrompt(
                self.bench.target,
                None if draft is None else self.bench.draft(draft),
                prompt.id,
                prompt.tokens,
                self.sampling,
                self.seed + index,
            )
            self._prepared[key] = self._stack.enter_context(prepared)
        return self._prepared[key]

    def survey(self, configurations: Sequence[Configuration], progress: Progress) -> Survey:
        drafts = list(dict.fromkeys(c.draft for c in configurations if not c.plain))
        looks = any(self.bench.length(c).looks_at_drafts for c in configurations)
        plain, generations = [], {draft: [] for draft in drafts}
        for index in self.first:
            progress(f"survey, prompt {index + 1} of {len(self.first)}", index / len(self.first))
            rules = [Surveying(self.max_k, looks) for _ in drafts]
            running = [
                self._prompt(draft, index).begin(DecodeOptions(rule, self.max_new_tokens))
                for draft, rule in zip([None, *drafts], [FixedLength(0), *rules], strict=True)
            ]
            alone, *others = in_turn(running, self._order)
            plain.append(alone)
            for draft, generation, rule in zip(drafts, others, rules, strict=True):
                generations[draft].append((generation, rule.rows))
        progress("survey, step costs", 0.95)
        step, verify = measure_verify(self._prompt(None, 0), self.max_k)
        return survey_of(plain, generations, step, verify, configurations, self.bench.length)

    def measure(
        self, configuration: Configuration, on_sample: Callable[[int, Sample], None], more: bool = False
    ) -> list[Sample]:
        options = self.bench.options(configuration, self.max_new_tokens)
        indices = range(len(self.first), len(self.prompts)) if more else self.first
        draft = configuration.draft
        if options.length.learns:
            # Measured as it serves: after it has seen such texts.
            for index in indices:
                self._prompt(draft, index).run(options)
        samples = []
        for _ in range(self.repeats):
            for index in indices:
                decoding = PreparedDecoding(self._prompt(draft, index), options)
                samples.append(measure_pair(self._prompt(None, index), decoding, self._order).sample)
                on_sample(len(samples) - 1, samples[-1])
        return samples


def survey_of(
    plain: Sequence[TimedGeneration],
    generations: dict[str, list[tuple[TimedGeneration, list]]],
    alone: float,
    verify: Sequence[float],
    configurations: Sequence[Configuration],
    make_rule: Callable[[Configuration], DraftLength],
) -> Survey:
    """From plain generations, each draft's at the longest K, and timed passes of each width.

    Widths are timed on one prompt, so they count as ratios to a plain step there; times are those of the runs.
    """
    middle = statistics.median
    target_step = middle(s.verify_seconds + s.commit_seconds for generation in plain for s in generation.steps)
    ratios = [seconds / alone for seconds in verify]
    drafts, rollback, predicted = {}, {}, {}
    costs: dict[str, Costs] = {}
    outputs: dict[str, list[list[Place]]] = {}
    for draft, pairs in generations.items():
        steps = [s for generation, _ in pairs for s in generation.steps]
        speculative = [s for s in steps if s.drafted]
        # A draft that has nothing to say still looks for it: that time belongs to the tokens it does propose.
        count, idle = sum(s.drafted for s in speculative), sum(s.draft_seconds for s in steps if not s.drafted)
        each = middle(s.draft_seconds / s.drafted for s in speculative) if speculative else 0.0
        draft_step = each + idle / count if count else 0.0
        commit = middle(s.commit_seconds for s in speculative) if speculative else 0.0
        costs[draft] = Costs(target_step, draft_step, tuple(r * target_step for r in ratios), commit)
        outputs[draft] = [places(generation.steps, rows) for generation, rows in pairs]
        drafts[draft] = DraftSurvey.of(Statistics(steps).counts, draft_step / target_step)
        rollback[draft] = commit / target_step
    for configuration in configurations:
        if configuration.plain:
            predicted[configuration] = 1.0
        elif not configuration.segments:
            rule = make_rule(configuration)
            predicted[configuration] = play(outputs[configuration.draft], costs[configuration.draft], rule)[1]
    return Survey(target_step, ratios, rollback, drafts, predicted)
