"""The target's own continuations of windows of text: a draft is judged on what the target writes."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridspec.checkpoints.modeling_files import CACHE_ARGUMENTS
from hybridspec.errors import UnsupportedLayerError

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
