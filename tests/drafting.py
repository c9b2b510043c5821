"""Speculation in tests: greedy runs with the counts of each step, and a draft that is wrong on purpose."""

from collections.abc import Sequence

import torch

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.loop import decode
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from tests.families import wrong
from tests.reference import GreedyRun


def generate(target: TargetRunner, prompt: list[int], count: int, draft: Draft | None = None, k: int = 4) -> GreedyRun:
    """Greedy tokens of our loop; plain decoding without a draft."""
    statistics = Statistics()
    options = {"k": k if draft else 0, "max_new_tokens": count, "stop_tokens": frozenset(), "statistics": statistics}
    tokens = [token.id for token in decode(target, prompt, draft=draft, **options)]
    return GreedyRun(tokens, [(step.drafted, step.accepted) for step in statistics.steps])


class Tampering(Draft, Drafting):
    """Another strategy's proposals, spoilt from the second token on in every other step: it must take tokens back."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.name, self.spoilt = draft, draft.name, True

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        generator: torch.Generator | None = None,
        target: Session | None = None,
    ) -> Drafting:
        self.drafting = self.draft.start(prompt, sampling, generator, target)
        return self

    def propose(self, k: int, proceed: Proceed | None = None) -> Proposal:
        tokens = self.drafting.propose(k, proceed).tokens
        self.spoilt = not self.spoilt
        return Proposal([*tokens[:1], *wrong(tokens[1:])] if self.spoilt else tokens)

    def accept(self, accepted: int, token: int) -> None:
        self.drafting.accept(accepted, token)

    def snapshot(self) -> object:
        return self.drafting.snapshot()

    def restore(self, mark: object) -> None:
        self.drafting.restore(mark)

    def close(self) -> None:
        self.drafting.close()
