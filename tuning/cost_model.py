"""What a draft length should give: measured acceptance and step costs in, speed-up out (DESIGN section 6)."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.tuning.trial import PreparedPrompt


@dataclass(frozen=True)
class Costs:
    """Median seconds of the parts of a step.

    ``target_step``: one plain token (verify of 1 and commit). ``draft_step``: one drafted token. ``verify[k]``:
    target pass over k + 1 tokens. ``rollback``: commit of target and draft after a partial rejection.
    """

    target_step: float
    draft_step: float
    verify: tuple[float, ...]
    rollback: float

    @property
    def draft_ratio(self) -> float:
        """c of the literature: draft step / target step."""
        return self.draft_step / self.target_step

    def verify_ratio(self, k: int) -> float:
        """v(K) of the literature: verify of K + 1 tokens / target step."""
        return self.verify[k] / self.target_step

    def step_ratio(self, k: int) -> float:
        """Time of one speculative step in target steps: K c + v(K) + rollback."""
        return k * self.draft_ratio + self.verify_ratio(k) + (self.rollback / self.target_step if k else 0.0)


def measure_costs(prompt: PreparedPrompt, longest: int, repeats: int = 5) -> Costs:
    """Times every part in turn, ``repeats`` times round, and takes medians (noise comes in bursts)."""
    clock = time.perf_counter
    verify: list[list[float]] = [[] for _ in range(longest + 1)]
    plain, draft, rollback, draft_rollback = [], [], [], []
    filler = [prompt.tokens[-1]] * (longest + 1)
    prompt.rewind()
    for _ in range(repeats):
        for k in range(longest + 1):
            begun = clock()
            prompt.session.verify(filler[: k + 1])
            verified = clock()
            prompt.session.commit(1)
            ended = clock()
            verify[k].append(verified - begun)
            if k == 0:
                plain.append(ended - begun)
            else:
                rollback.append(ended - verified)
            prompt.session.restore(prompt.target_mark)
        if longest:
            begun = clock()
            proposal = prompt.drafting.propose(longest)
            drafted = clock()
            prompt.drafting.accept(0, prompt.tokens[-1])
            draft.append((drafted - begun) / max(1, len(proposal.tokens)))
            draft_rollback.append(clock() - drafted)
            prompt.rewind()
    middle = statistics.median
    return Costs(
        target_step=middle(plain),
        draft_step=middle(draft) if draft else 0.0,
        verify=tuple(middle(v) for v in verify),
        rollback=middle(rollback) + middle(draft_rollback) if longest else 0.0,
    )


def acceptance_length(acceptance_by_position: Sequence[float], k: int) -> float:
    """tau(K) = 1 + sum of the unconditional acceptance at positions 1..K."""
    return 1.0 + sum(acceptance_by_position[:k])


def predicted_speedup(acceptance_by_position: Sequence[float], costs: Costs, k: int) -> float:
    """tau(K) / (K c + v(K) + rollback); 1 for K = 0 up to the plain commit that both sides pay."""
    return acceptance_length(acceptance_by_position, k) / costs.step_ratio(k) if k else 1.0


def ideal_speedup(tau: float, costs: Costs, k: int) -> float:
    """tau / (K c + v(K)): what a loop without any overhead of its own would reach."""
    return tau / (k * costs.draft_ratio + costs.verify_ratio(k)) if k else 1.0
