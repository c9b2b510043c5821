"""Models that are enabled for transformers' own assisted generation, and their texts, for tests."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from tests.families import family_model, noisy_model, some_tokens
from tests.reference import next_logits

COUNT = 32
LONG, SHORT = 45, 6


DRAFTED = 4


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that drafts a fixed number of tokens, and for which no token is padding."""
    model = copy.deepcopy(model)
    model.generation_config.pad_token_id = None
    model.generation_config.num_assistant_tokens = DRAFTED
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def target(name: str) -> PreTrainedModel:
    return prepared(family_model(name))


def noisy(name: str) -> PreTrainedModel:
    return prepared(noisy_model(name, 0.1))


class Echo(LogitsProcessor):
    """Favours what followed the last token before, unless it is just over: a random model then repeats itself at times,
    and not in circles.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        followed = [b for a, b in zip(text, text[1:], strict=False) if a == text[-1] and b not in text[-12:]]
        if followed:
            scores = scores.clone()
            scores[:, followed[-1]] += 2.0 * scores.std()
        return scores


def generate(model: PreTrainedModel, text: Tensor, count: int = COUNT, **options: Any) -> list[int]:
    """The new tokens, greedily."""
    output = model.generate(text, max_new_tokens=count, do_sample=False, **options)
    return output[0, text.shape[1] :].tolist()


def assert_same_tokens(model: PreTrainedModel, text: Tensor, actual: list[int], expected: list[int]) -> None:
    """With the margin by which the model prefers the right token, which tells a wrong state from a tie."""
    if actual == expected:
        return
    i = next((i for i, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), None)
    assert i is not None, f"{len(actual)} tokens instead of {len(expected)}"
    logits = next_logits(model, [*text[0].tolist(), *expected[:i]])[-1]
    margin = (logits[expected[i]] - logits[actual[i]]).item()
    pytest.fail(
        f"new token {i} is {actual[i]} instead of {expected[i]}: their logits are {margin:.2e} apart, of a spread of "
        f"{logits.std():.2e}"
    )


def varied(model: PreTrainedModel, length: int, count: int = COUNT, **options: Any) -> tuple[Tensor, list[int]]:
    """A prompt and its plain continuation; of a text that soon repeats one token, an equal output would show little."""
    for seed in range(20):
        text = torch.tensor([some_tokens(length, seed)])
        plain = generate(model, text, count, **options)
        if len(set(plain)) >= min(12, count // 2):
            return text, plain
    raise AssertionError("no prompt gives many distinct tokens")
