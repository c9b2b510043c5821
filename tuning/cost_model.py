"""What a configuration should give: a survey of the draft and step costs in, speed-up out (docs/cost-model.md).

A draft that chooses its tokens from the committed text alone (every greedy one) is right or wrong at a place of the
output whatever block it stands in. So one run with long blocks tells, for each place, whether the draft meets it, and
any draft length or rule can be played through on that: the same loop, with measured times in place of the models.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.step import Step
from hybridspec.drafts.length.estimates import Curve
from hybridspec.tuning.timed_decoding import PreparedPrompt

#: Entries of a draft's distribution that a survey keeps; their entropy is that of the whole to within its tail.
KEPT_ROW = 1024


@dataclass(frozen=True)
class Costs:
    """Median seconds of the parts of a step.

    ``target_step``: one plain token (verify of 1 and commit). ``verify[k]``: target pass over k + 1 tokens.
    ``draft_step``: one drafted token. ``rollback``: commit of target and draft after a speculative step.
    """

    target_step: float
    draft_step: float
    verify: tuple[float, ...]
    rollback: float

    def step(self, k: int, accepted: int = 0) -> Step:
        """What a step with ``k`` drafted tokens takes: K c + v(K) + rollback, in seconds."""
        commit = self.rollback if k else self.target_step - self.verify[0]
        return Step(k, accepted, k * self.draft_step, self.verify[k], max(0.0, commit))


def measure_verify(prompt: PreparedPrompt, longest: int, repeats: int = 6) -> tuple[float, list[float]]:
    """Seconds of a plain step, and of target passes over 1 to ``longest`` + 1 tokens.

    Noise comes in bursts and clocks drift: each pass counts as a ratio to the plain steps right before and after it,
    and medians over ``repeats`` and a line through all lengths take out most of what is left.
    """
    filler = [prompt.tokens[-1]] * (longest + 1)

    def timed(k: int) -> tuple[float, float]:
        begun = time.perf_counter()
        prompt.session.verify(filler[: k + 1])
        verified = time.perf_counter()
        prompt.session.commit(1)
        whole = time.perf_counter() - begun
        prompt.session.restore(prompt.target_mark)
        return verified - begun, whole

    prompt.rewind()
    curve, plain = Curve(repeats * max(1, longest)), []
    for _ in range(repeats):
        plain.append(timed(0))
        for k in range(1, longest + 1):
            verified, _ = timed(k)
            plain.append(timed(0))
            curve.add(k, 2 * verified / (plain[-2][1] + plain[-1][1]))
    step = statistics.median(whole for _, whole in plain)
    first = statistics.median(verified / whole for verified, whole in plain)
    return step, [ratio * step for ratio in (first, *(curve.table(longest, first) or ()))]


class Surveying(FixedLength):
    """The fixed length ``k``, noting the distribution of each drafted token if ``rows`` are wanted."""

    def __init__(self, k: int, rows: bool) -> None:
        super().__init__(k)
        self.looks_at_drafts = rows
        self.rows: list[list[Tensor]] = [[]]

    def proceed(self, probabilities: Tensor) -> bool:
        self.rows[-1].append(probabilities.topk(min(KEPT_ROW, len(probabilities))).values)
        return True

    def observe(self, step: Step) -> None:
        self.rows.append([])


@dataclass(frozen=True)
class Place:
    """One token of the output: whether the draft meets it (None: it proposes nothing here, or was not asked), and the
    distribution it chose from, sorted, if that was noted.
    """

    met: bool | None
    row: Tensor | None = None
    asked: bool = True


def places(steps: Sequence[Step], rows: Sequence[Sequence[Tensor]]) -> list[Place]:
    """The output of a surveying run, place by place.

    A bonus token was not asked of the draft: its place is open.
    """
    found = []
    for number, step in enumerate(steps):
        noted = list(rows[number]) if number < len(rows) else []
        noted += [None] * (step.drafted - len(noted))
        found += [Place(True, noted[i]) for i in range(step.accepted)]
        if step.accepted < step.drafted:
            found.append(Place(False, noted[step.accepted]))
        else:
            found.append(Place(None, None, asked=step.drafted == 0))
    return found


def play(
    outputs: Sequence[Sequence[Place]], costs: Costs, rule: DraftLength, seed: int = 0
) -> tuple[list[Step], float]:
    """Plays ``rule`` through the surveyed outputs: the steps it would take, and the speed-up over plain decoding.

    An open place is met with the share of the places that were asked.
    """
    rng = random.Random(seed)
    asked = [place.met for output in outputs for place in output if place.met is not None]
    share = sum(asked) / len(asked) if asked else 0.0
    flags = [[rng.random() < share if p.met is None and not p.asked else p.met for p in output] for output in outputs]
    # A rule that learns is predicted as it is measured: at its second look at the workload.
    for _ in range(2 if rule.learns else 1):
        steps = [s for output, met in zip(outputs, flags, strict=True) for s in _play_one(output, met, costs, rule)]
    seconds = sum(s.draft_seconds + s.verify_seconds + s.commit_seconds for s in steps)
    return steps, sum(map(len, outputs)) * costs.target_step / seconds


def _play_one(output: Sequence[Place], met: Sequence[bool | None], costs: Costs, rule: DraftLength) -> Iterator[Step]:
    at = 0
    while at < len(output):
        # As in the loop: the last token of the output is never drafted.
        wanted = min(rule.limit(), len(output) - at - 1)
        drafted = accepted = 0
        missed = False
        while drafted < wanted and met[at] is not None:
            place = at + drafted
            # Behind a miss the draft goes on from a text that the survey has not seen: no distribution is known.
            row = None if missed else output[place].row
            missed = missed or not met[place]
            accepted += not missed
            drafted += 1
            if rule.looks_at_drafts and row is not None and not rule.proceed(row):
                break
        step = costs.step(min(drafted, len(costs.verify) - 1), accepted)
        rule.observe(step)
        yield step
        at += accepted + 1


def predicted_speedup(acceptance_by_position: Sequence[float], costs: Costs, k: int) -> float:
    """tau(K) / (K c + v(K) + rollback) with tau(K) = 1 + sum of the unconditional acceptance at positions 1..K: the
    closed form, from acceptance by position alone; 1 for K = 0.
    """
    step = costs.step(k)
    seconds = step.draft_seconds + step.verify_seconds + step.commit_seconds
    return (1.0 + sum(acceptance_by_position[:k])) * costs.target_step / seconds


def wilson_interval(hits: int, count: int, z: float = 1.645) -> tuple[float, float]:
    """90 % interval of a share (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * ((share * (1 - share) + square / 4) / count) ** 0.5
    # Rounding must not put the share itself outside.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
