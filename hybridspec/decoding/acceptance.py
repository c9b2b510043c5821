"""Which drafted tokens stay: greedy matching, and two ways of sampling that keep the target's distribution.

Names as in the papers: ``p`` is the target's distribution, ``q`` the draft's.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling, draw
from hybridspec.errors import InputError

#: ``token``: rejection sampling token by token; ``block``: the drafted block judged as a whole, which keeps more.
Verification = Literal["token", "block"]


class Verdict(NamedTuple):
    """The first ``accepted`` drafted tokens stay; ``token`` follows them: a bonus if all stayed, else a correction."""

    accepted: int
    token: int


def verdict(
    logits: Tensor,
    proposal: Proposal,
    sampling: Sampling,
    verification: Verification,
    generator: torch.Generator | None,
) -> Verdict:
    """Judges a block by the target's ``logits [K + 1, vocab]``, as ``sampling`` asks."""
    if sampling.greedy:
        return greedy(logits, proposal.tokens)
    if verification not in get_args(Verification):
        raise InputError(f"unknown verification {verification!r}: choose one of {', '.join(get_args(Verification))}")
    p, q = sampling.probabilities(logits), proposal.probabilities
    if q is not None and q.shape[-1] != p.shape[-1]:
        # Some models leave the padding of the vocabulary out of their logits.
        width = max(p.shape[-1], q.shape[-1])
        p, q = (functional.pad(x, (0, width - x.shape[-1])) for x in (p, q))
    sampler = block_verification if verification == "block" else rejection_sampling
    return sampler(p, q, proposal.tokens, generator)


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
        q: ``[K, vocab]`` draft distributions that the drafted tokens were sampled from; None if K is 0.
    """
    for i, x in enumerate(draft_tokens):
        # Strict: a token that the target never gives is never kept, not even by a zero draw.
        if torch.rand((), generator=generator).item() * q[i, x].item() < p[i, x].item():
            continue
        return Verdict(i, _from_residual(p[i], q[i], generator))
    return Verdict(len(draft_tokens), draw(p[len(draft_tokens)], generator))


def block_verification(
    p: Tensor, q: Tensor | None, draft_tokens: list[int], generator: torch.Generator | None = None
) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2): accepts at least as many tokens on average as
    token by token, from the same numbers.

    With ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))``, ``w_0 = 1``, the first i tokens are kept together with probability
    ``w_i`` in all. So i is judged by ``h_i = r_i / (r_i + 1 - w_i)`` with ``r_i = sum_x max(0, w_i p_{i+1}(x) -
    q_{i+1}(x))``, the part of it that longer blocks do not use, and ``h_K = w_K``; the longest i that passes stays, and
    what follows is a sample of norm(max(0, w_i p_{i+1} - q_{i+1})), or of p at the end of the block.

    Arguments and shapes as in :func:`rejection_sampling`. The block's length may be a stopping time: the argument holds
    for each node of the tree of drafts, wherever it ends.
    """
    weight, kept, kept_weight = 1.0, 0, 1.0
    for i, x in enumerate(draft_tokens, 1):
        weight = min(1.0, weight * p[i - 1, x].item() / q[i - 1, x].item())
        if i == len(draft_tokens):
            passes = weight
        else:
            left = (weight * p[i] - q[i]).clamp(min=0.0).sum().item()
            passes = left / (left + 1.0 - weight) if left > 0 else 0.0
        if torch.rand((), generator=generator).item() < passes:
            kept, kept_weight = i, weight
    if kept == len(draft_tokens):
        return Verdict(kept, draw(p[kept], generator))
    return Verdict(kept, _from_residual(kept_weight * p[kept], q[kept], generator, p[kept]))


def _from_residual(p: Tensor, q: Tensor, generator: torch.Generator | None, otherwise: Tensor | None = None) -> int:
    """A sample of norm(max(p - q, 0)).

    Equal distributions leave no residual; a rejection is then rounding, and ``otherwise`` (``p``) itself is right.
    """
    residual = (p - q).clamp(min=0.0)
    mass = residual.sum()
    return draw(residual / mass if mass > 0 else p if otherwise is None else otherwise, generator)
