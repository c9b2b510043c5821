"""Rules that stop where the draft itself is unsure: SVIP and AdaEDL.

When to use them: predictability changes from token to token within a text, as in code or in prose with formulas, and
the draft's uncertainty tells where it will be wrong. They know nothing of costs: where a verify pass over more tokens
is dear, or speculation does not pay at all, take :class:`~hybridspec.drafts.length.expected_gain.ExpectedGain`. They
have no say in strategies that look tokens up instead of computing a distribution.

Cost: one softmax and one entropy over the vocabulary for each drafted token; nothing else is kept.
"""

import math

from torch import Tensor
from torch.special import entr

from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.step import Step
from hybridspec.drafts.length.options import checked


def entropy(probabilities: Tensor) -> float:
    """Entropy in nats of ``[vocab]``."""
    return float(entr(probabilities).sum())


class SVIP(DraftLength):
    """Stops after the first token drafted from a distribution q with sqrt(0.15 H(q)) > ``threshold``.

    The chance that a token is accepted is at least 1 - sqrt(KL(q || p) / 2), and the divergence from the target is
    taken as a constant part of the draft's entropy H (nats). Self-verification length policy, arXiv 2411.18462; 0.15
    and 0.3 are those of its code, which caps a block at 40 tokens.

    Args:
        threshold: h of the paper; smaller drafts less. 0 stops after one token unless the draft is certain.
        longest: most tokens in a block.
    """

    looks_at_drafts = True
    SCALE = 0.15

    def __init__(self, threshold: float = 0.3, longest: int = 16) -> None:
        self.name = "svip"
        self.threshold = checked(self.name, "threshold", threshold, 0)
        self.longest = checked(self.name, "longest", longest, 1, whole=True)

    def limit(self) -> int:
        return self.longest

    def proceed(self, probabilities: Tensor) -> bool:
        return math.sqrt(self.SCALE * entropy(probabilities)) <= self.threshold


class AdaEDL(DraftLength):
    """Stops after the first token drafted from a distribution q with 1 - sqrt(``gamma`` H(q)) < lambda, and moves
    lambda so that a set share of the drafted tokens is accepted.

    The left side bounds the chance of acceptance from below: adaptive entropy-based draft length, arXiv 2410.18351,
    gamma 0.2. After each step that drafted, with r = accepted / drafted,

        AR <- beta_1 AR + (1 - beta_1) r
        lambda <- beta_2 lambda + (1 - beta_2) (lambda + epsilon if AR <= target_acceptance, else lambda - epsilon)

    which is the update of Draft & Verify, arXiv 2309.08168, with its constants. lambda stays within 0 and 1. Its start
    is ours: 0.65 stops about where :class:`SVIP` does. A step moves lambda by at most (1 - beta_2) epsilon = 0.001, so
    it follows a workload over hundreds of steps, not over tens; a draft that never reaches ``target_acceptance`` ends
    at one token a step.

    Args:
        gamma: scale of the entropy.
        threshold: lambda at the start; larger drafts less.
        target_acceptance: share of the drafted tokens that is to be accepted.
        beta_1: memory of the share that was accepted.
        beta_2: memory of lambda.
        epsilon: step of lambda; 0 keeps lambda as it is.
        longest: most tokens in a block.

    Attributes:
        threshold: lambda as it stands.
        acceptance: AR as it stands, ``target_acceptance`` before the first step.
    """

    looks_at_drafts = True

    def __init__(
        self,
        gamma: float = 0.2,
        threshold: float = 0.65,
        target_acceptance: float = 0.9,
        beta_1: float = 0.5,
        beta_2: float = 0.9,
        epsilon: float = 0.01,
        longest: int = 16,
    ) -> None:
        self.name = "adaedl"
        self.gamma = checked(self.name, "gamma", gamma, 0)
        self.threshold = checked(self.name, "threshold", threshold, 0, 1)
        self.target_acceptance = self.acceptance = checked(self.name, "target_acceptance", target_acceptance, 0, 1)
        self.beta_1 = checked(self.name, "beta_1", beta_1, 0, 1)
        self.beta_2 = checked(self.name, "beta_2", beta_2, 0, 1)
        self.epsilon = checked(self.name, "epsilon", epsilon, 0, 1)
        self.longest = checked(self.name, "longest", longest, 1, whole=True)

    def limit(self) -> int:
        return self.longest

    def proceed(self, probabilities: Tensor) -> bool:
        return 1 - math.sqrt(self.gamma * entropy(probabilities)) >= self.threshold

    def observe(self, step: Step) -> None:
        if not step.drafted:
            return
        self.acceptance = self.beta_1 * self.acceptance + (1 - self.beta_1) * step.accepted / step.drafted
        moved = self.threshold + (self.epsilon if self.acceptance <= self.target_acceptance else -self.epsilon)
        self.threshold = min(1.0, max(0.0, self.beta_2 * self.threshold + (1 - self.beta_2) * moved))
