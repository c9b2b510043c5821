"""Compares tokens with those of a run without speculation, and tells a near tie from corruption."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["equal", "near tie", "corrupt", "failed", "not possible"]

#: Difference of two log probabilities that another order of summation explains, by the logits' type: bfloat16 keeps
#: 8 bits, so that logits of 16 to 32 come in steps of 1/8.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.04, "float32": 0.005}


@dataclass(frozen=True)
class Divergence:
    """Where a sequence first differs.

    Args:
        sequence, position: number of the prompt, and of the generated token.
        expected, got: token ids.
        margin: log probability of ``expected`` minus that of ``got``, in the run without speculation.
        at_least: ``got`` was not among the likeliest tokens that were recorded: the margin is larger.
    """

    sequence: int
    position: int
    expected: int
    got: int
    margin: float
    at_least: bool = False

    def __str__(self) -> str:
        sign = ">" if self.at_least else ""
        return (
            f"prompt {self.sequence}, token {self.position}: {self.got} instead of {self.expected}, "
            f"margin {sign}{self.margin:.3g}"
        )


@dataclass(frozen=True)
class TokenComparison:
    """``divergences`` has one entry at most for each sequence; after it nothing can be compared.

    Args:
        compared: tokens up to the divergences.
    """

    divergences: list[Divergence]
    compared: int
    near_tie: float

    @property
    def status(self) -> Status:
        if not self.divergences:
            return "equal"
        return "near tie" if all(self.is_tie(d) for d in self.divergences) else "corrupt"

    @property
    def worst(self) -> Divergence | None:
        """The one with the largest margin."""
        return max(self.divergences, key=lambda d: d.margin, default=None)

    def is_tie(self, divergence: Divergence) -> bool:
        return not divergence.at_least and divergence.margin <= self.near_tie


def compare(
    expected: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Mapping[str, float]]],
    got: Sequence[Sequence[int]],
    near_tie: float,
) -> TokenComparison:
    """Compares sequence by sequence.

    Args:
        expected: generated tokens without speculation.
        logprobs: for each of them, token id (as text) -> log probability of the likeliest.
        got: generated tokens with speculation; one that ends early differs there.
    """
    divergences, compared = [], 0
    for number, (mine, tops, theirs) in enumerate(zip(expected, logprobs, got, strict=True)):
        position = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if position is None and len(theirs) != len(mine):
            position = min(len(mine), len(theirs))
        compared += len(mine) if position is None else position
        if position is None:
            continue
        right = mine[position] if position < len(mine) else -1
        wrong = theirs[position] if position < len(theirs) else -1
        top = tops[position] if position < len(tops) else {}
        known = str(wrong) in top and str(right) in top
        base = top.get(str(right), 0.0)
        margin = base - (top[str(wrong)] if known else min(top.values(), default=base))
        divergences.append(Divergence(number, position, right, wrong, margin, not known))
    return TokenComparison(divergences, compared, near_tie)
