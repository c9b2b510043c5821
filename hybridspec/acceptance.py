"""Which drafted tokens stay: greedy matching, and rejection sampling that keeps the target's distribution.

Names as in the papers: ``p`` is the target's distribution, ``q`` the draft's.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hybridspec.sampling import draw


class Verdict(NamedTuple):
    """The first ``accepted`` drafted tokens stay; ``token`` follows them: a bonus if all stayed, else a correction."""

    accepted: int
    token: int


def greedy(logits: Tensor, draft_tokens: list[int]) -> Verdict:
    """Keeps drafted tokens as long as each is the target's argmax.

    Args:
        logits: ``[K + 1, vocab]``; row i follows the i-th token of the block (last token, then the K drafted ones).
    """
    choices = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def rejection_sampling(
    p: Tensor, q: Tensor | None, draft_tokens: list[int], generator: torch.Generator | None = None
) -> Verdict:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Token x stays with probability min(1, p(x) / q(x)); the first that does not is replaced by a sample of
    norm(max(p - q, 0)); if all stay, the bonus token is a sample of p. The result follows p exactly.

    Args:
        p: ``[K + 1, vocab]`` target distributions.
        q: ``[K, vocab]`` draft distributions that the drafted tokens were sampled from; None if K is 0. It may be wider
            or narrower than ``p``: some models leave the padding of the vocabulary out of their logits.
    """
    if q is not None and q.shape[-1] != p.shape[-1]:
        width = max(p.shape[-1], q.shape[-1])
        p, q = (functional.pad(x, (0, width - x.shape[-1])) for x in (p, q))
    for i, x in enumerate(draft_tokens):
        # Strict: a token that the target never gives is never kept, not even by a zero draw.
        if torch.rand((), generator=generator).item() * q[i, x].item() < p[i, x].item():
            continue
        residual = (p[i] - q[i]).clamp(min=0.0)
        mass = residual.sum()
        # Equal distributions leave no residual; a rejection is then rounding, and p itself is right.
        return Verdict(i, draw(residual / mass if mass > 0 else p[i], generator))
    return Verdict(len(draft_tokens), draw(p[len(draft_tokens)], generator))
