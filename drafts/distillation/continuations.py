"""The target's own continuations of windows of text: a draft is judged on what the target writes."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.decoding.loop import decode
from hybridspec.decoding.sampling import Sampling
from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner

TEMPERATURES = (0.0, 0.7, 1.0)


@torch.inference_mode()
def continue_windows(
    model: PreTrainedModel,
    windows: Tensor,
    length: int,
    generator: torch.Generator,
    tick: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Token ids ``[rows, length]`` that begin with ``windows [rows, prompt]``; row i uses temperature i modulo 3.

    ``tick`` is told each length that is reached.

    Raises:
        UnsupportedLayerError: the model does not give its past away, so that it could be continued.
    """
    rows = windows.shape[0]
    temperatures = torch.tensor(TEMPERATURES).repeat(-(-rows // len(TEMPERATURES)))[:rows]
    greedy = temperatures == 0.0
    parameters = inspect.signature(model.forward).parameters
    cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
    options: dict[str, object] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    tokens, block = [windows], windows
    for position in range(windows.shape[1], length):
        if "position_ids" in parameters:
            start = position - block.shape[1]
            options["position_ids"] = torch.arange(start, position).expand(rows, -1)
        output = model(input_ids=block, use_cache=True, **options)
        options[cache_argument] = getattr(output, cache_argument, None)
        if options[cache_argument] is None:
            raise UnsupportedLayerError(f"{type(model).__name__} returns no cache to continue from")
        logits = output.logits[:, -1]
        scaled = logits / temperatures.clamp(min=1e-6).unsqueeze(1)
        probabilities = torch.where(greedy.unsqueeze(1), logits, scaled).softmax(-1)
        sampled = torch.multinomial(probabilities, 1, generator=generator)
        block = torch.where(greedy.unsqueeze(1), logits.argmax(-1, keepdim=True), sampled)
        tokens.append(block)
        tick(position + 1)
    return torch.cat(tokens, 1)


def continue_one_by_one(
    target: TargetRunner,
    windows: Tensor,
    length: int,
    generator: torch.Generator,
    tick: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """As :func:`continue_windows`, for a model that only our own sessions can continue."""
    rows = []
    for number, window in enumerate(windows.tolist()):
        sampling = Sampling(TEMPERATURES[number % len(TEMPERATURES)])
        options = {"max_new_tokens": length - len(window), "sampling": sampling, "generator": generator}
        rows.append([*window, *(token.id for token in decode(target, window, stop_tokens=frozenset(), **options))])
        tick(round(length * (number + 1) / len(windows)))
    return torch.tensor(rows)
