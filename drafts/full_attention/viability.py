"""Whether a target can draft for itself with its full-attention layers: a measurement before anyone waits for more."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec.drafts.full_attention.block_pass import alone_pass, draft_pass, target_pass
from hybridspec.drafts.full_attention.reduced import ReducedModel
from hybridspec.errors import InputError

#: Perplexity ratios below which it can pay, and above which it cannot (the project's own experience).
CAN_PAY, CANNOT_PAY = 5.0, 20.0
#: Tokens of a window: long texts are cut into such pieces.
WINDOW = 256
#: Name of the row of all texts.
TOGETHER = "all"


@dataclass(frozen=True)
class Viability:
    """Teacher-forced, on the text's own tokens.

    Attributes:
        tokens: number of predictions.
        perplexity: of the target.
        reduced_perplexity: of the reduced model as it drafts its first token, on the target's keys and values.
        alone_perplexity: of the reduced model on its own keys and values throughout.
        agreement: share of positions with the target's likeliest token.
        acceptance: of a first drafted token at temperature 1: the sum over tokens of min(p, q), averaged.
    """

    tokens: int
    perplexity: float
    reduced_perplexity: float
    alone_perplexity: float
    agreement: float
    acceptance: float

    @property
    def ratio(self) -> float:
        return self.reduced_perplexity / self.perplexity

    @property
    def alone_ratio(self) -> float:
        return self.alone_perplexity / self.perplexity

    @property
    def verdict(self) -> str:
        """``can pay``, ``doubtful`` or ``cannot pay``, by :attr:`ratio`."""
        return "can pay" if self.ratio < CAN_PAY else "doubtful" if self.ratio <= CANNOT_PAY else "cannot pay"


class Totals:
    """Sums over windows, from which :class:`Viability` is made."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums = [0.0] * 5

    def add(self, other: "Totals") -> None:
        self.tokens += other.tokens
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def viability(self) -> Viability:
        target, reduced, alone, agreement, acceptance = (x / self.tokens for x in self.sums)
        # A reduced model may be so far off that its perplexity is beyond a float.
        exp = [math.exp(min(x, 700.0)) for x in (target, reduced, alone)]
        return Viability(self.tokens, *exp, agreement, acceptance)


def windows(texts: Iterable[Sequence[int]], most: int) -> list[list[int]]:
    """Pieces of at most ``WINDOW`` tokens of token lists, ``most`` tokens in all.

    Raises:
        InputError: no text has two tokens.
    """
    pieces: list[list[int]] = []
    left = most
    for text in texts:
        for start in range(0, len(text) - 1, WINDOW):
            piece = list(text[start : start + min(WINDOW, left)])
            if len(piece) > 1 and left > 0:
                pieces.append(piece)
                left -= len(piece)
    if not pieces:
        raise InputError("there is nothing to predict in this text: give at least two tokens")
    return pieces


@torch.no_grad()
def measure(reduced: ReducedModel, piece: Sequence[int]) -> Totals:
    """The sums of one window of token ids."""
    ids = torch.tensor([list(piece)], device=reduced.target.device)
    truth = target_pass(reduced, ids)
    drafted, _ = draft_pass(reduced, ids, truth, block=1)
    logs = [rows[0, :-1].float().log_softmax(-1) for rows in (truth.logits, drafted, alone_pass(reduced, ids))]
    labels = ids[0, 1:, None]
    p, q = logs[0].exp(), logs[1].exp()
    totals = Totals()
    totals.tokens = len(labels)
    losses: list[Tensor] = [-log.gather(1, labels).sum() for log in logs]
    agreement = (p.argmax(-1) == q.argmax(-1)).sum()
    totals.sums = [float(x) for x in (*losses, agreement, torch.minimum(p, q).sum())]
    return totals


def probe(reduced: ReducedModel, texts: Iterable[Sequence[int]], most: int = 2000) -> Viability:
    """:func:`measure` over at most ``most`` tokens of token lists.

    Raises:
        InputError: no text has two tokens.
    """
    return probe_each(reduced, {"": texts}, most)[TOGETHER]


def probe_each(
    reduced: ReducedModel,
    texts: Mapping[str, Iterable[Sequence[int]]],
    most: int,
    track: Callable[[Sequence[tuple[str, list[int]]]], Iterable[tuple[str, list[int]]]] = iter,
) -> dict[str, Viability]:
    """:func:`probe` for each name of ``texts``, and under ``all`` for everything together.

    Args:
        most: tokens of each text.
        track: passes the (name, window) pairs on, one after the other, to show how far the work is.

    Raises:
        InputError: a text has not two tokens.
    """
    work = [(name, piece) for name, parts in texts.items() for piece in windows(parts, most)]
    totals = {name: Totals() for name in texts}
    for name, piece in track(work):
        totals[name].add(measure(reduced, piece))
    together = Totals()
    for each in totals.values():
        together.add(each)
    return {name: each.viability() for name, each in totals.items()} | {TOGETHER: together.viability()}
