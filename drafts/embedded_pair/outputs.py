"""Writes a pool of the target's own continuations of corpus windows, for drafts to learn from.

    python -m hybridspec.drafts.embedded_pair.outputs --target RUN/target --data DATA --out RUN/outputs.npy --minutes 8

A draft is judged on what the target writes, which is not what the corpus says. A third of the rows is greedy, a third
sampled at 0.7, a third at 1. The file grows by batches: a second run with more minutes goes on.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hybridspec.drafts.distillation.continuations import continue_windows
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE


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
