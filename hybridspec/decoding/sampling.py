"""From logits to distributions, with transformers' own warpers: the same object serves target and draft."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hybridspec.errors import InputError

LOWEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy.

    Raises:
        InputError: a value is out of range; names it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if 0.0 < self.temperature < LOWEST_TEMPERATURE:
            raise InputError(f"temperature {self.temperature} is too low to divide by: use 0 for greedy")
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise InputError(f"top-k must be a whole number of at least 1, not {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top-p must be above 0 and at most 1, not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def warpers(self) -> LogitsProcessorList:
        """transformers' processors in the order in which its ``generate`` applies them."""
        warpers = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[T, vocab]`` logits to fp32 distributions of the same shape. Needs a temperature above 0."""
        unused_ids = torch.empty(logits.shape[0], 0, dtype=torch.long, device=logits.device)
        # On the CPU, where one generator serves all draws: token by token, a device would be asked for each number.
        return self.warpers()(unused_ids, logits.float()).softmax(-1).cpu()

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> tuple[int, Tensor | None]:
        """A token from ``[1, vocab]`` logits and, unless greedy, the distribution ``[1, vocab]`` it was drawn from."""
        if self.greedy:
            return int(logits.argmax()), None
        probabilities = self.probabilities(logits)
        return draw(probabilities[0], generator), probabilities


def distribution(logits: Tensor, probabilities: Tensor | None) -> Tensor:
    """``[vocab]``: what a token was drawn from, or, under greedy decoding, the softmax of its ``[1, vocab]`` logits."""
    return logits[0].float().softmax(-1) if probabilities is None else probabilities[0]


def draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """One token from ``[vocab]`` probabilities."""
    return int(torch.multinomial(probabilities, 1, generator=generator))
