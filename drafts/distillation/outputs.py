"""Writes a pool of the target's own continuations of corpus windows, for drafts to learn from.

    python -m hybridspec.drafts.distillation.outputs --target RUN/target --data DATA --out RUN/outputs.npy --minutes 8

A draft is judged on what the target writes, which is not what the corpus says. A third of the rows is greedy, a third
sampled at 0.7, a third at 1. The file grows by batches: a second run with more minutes goes on.
"""

import argparse
import inspect
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.errors import UnsupportedLayerError
from hybridspec.runtime.model_facts import CACHE_ARGUMENTS

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for this call")
    parser.add_argument("--rows", type=int, default=63)
    parser.add_argument("--prompt", type=int, default=96, help="tokens of corpus text in front")
    parser.add_argument("--length", type=int, default=513, help="tokens per row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32, local_files_only=True).eval()
    sampler = WindowSampler(arguments.data, MIXTURE, arguments.seed)
    pool = [np.load(arguments.out)] if arguments.out.is_file() else []
    begun = time.monotonic()
    while time.monotonic() - begun < 60 * arguments.minutes:
        step = sum(map(len, pool))
        windows = sampler.batch(step, 0, arguments.rows, arguments.prompt - 1)
        generator = torch.Generator().manual_seed(arguments.seed * 1_000_003 + step)
        pool.append(continue_windows(model, windows, arguments.length, generator).numpy().astype(np.uint16))
        partial = arguments.out.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(pool))
        partial.replace(arguments.out)
        print(f"{sum(map(len, pool)):,} rows of {arguments.length} tokens", flush=True)


if __name__ == "__main__":
    main()
