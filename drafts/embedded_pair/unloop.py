"""A last, short phase for the target: learn from its own loops not to fall into them.

    torchrun --nproc-per-node 2 -m hybridspec.drafts.embedded_pair.unloop --target RUN/target --data DATA \\
        --out RUN/unloop

Small models decode greedily into cycles ("I am away, I am away"). Every few steps the model continues corpus windows;
where a continuation repeats itself with some period, its tokens get the unlikelihood loss -log(1 - p) (Welleck et
al., arXiv 1908.04319) beside the usual loss on corpus text. Records that differ in a number are no cycle, so logs and
JSON keep their regularity.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridspec.drafts.distillation.continuations import continue_windows
from hybridspec.drafts.distillation.sitting import Processes, Sitting
from hybridspec.drafts.distillation.training_kernels import native_kernels, training_kernels
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.drafts.embedded_pair.target import compile_layers
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer

LONGEST_PERIOD = 24
SHORTEST_RUN = 8
#: The first tokens of a repeat are left alone: repeating a word or two is no loop.
GRACE = 3


def loop_mask(tokens: Tensor, first: int) -> Tensor:
    """True where ``tokens [rows, T]`` from position ``first`` on repeat what stood one period before.

    A run of such tokens counts when it is as long as its period and at least 8 tokens.
    """
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row in range(tokens.shape[0]):
        for period in range(1, LONGEST_PERIOD + 1):
            same = (tokens[row, period:] == tokens[row, :-period]).tolist()
            run = 0
            for i, repeated in enumerate([*same, False]):
                if repeated:
                    run += 1
                    continue
                if run >= max(period, SHORTEST_RUN):
                    end = i + period
                    mask[row, end - run + GRACE : end] = True
                run = 0
    mask[:, :first] = False
    return mask


def unlikelihood(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean of -log(1 - p(token)) over masked positions, 0 without any; ``logits[:, i]`` predicts ``tokens[:, i]``."""
    p = logits.softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return -(torch.log1p(-p.clamp(max=0.999)) * mask).sum() / mask.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="trained target to start from")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0, help="time budget over all sittings")
    parser.add_argument("--rows", type=int, default=4, help="corpus windows per process and step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--own-rows", type=int, default=8, help="own continuations per process and step")
    parser.add_argument("--refresh", type=int, default=4, help="steps between new continuations")
    parser.add_argument("--weight", type=float, default=0.5, help="weight of the unlikelihood loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    load = AutoModelForCausalLM.from_pretrained
    model: PreTrainedModel = load(arguments.target, dtype=torch.float32, local_files_only=True)
    # Layers compile in place; continuations run a twin that shares the weights.
    twin: PreTrainedModel = load(arguments.target, dtype=torch.float32, local_files_only=True).eval()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.data = ours.data
    sampler = WindowSampler(arguments.data, MIXTURE, arguments.seed)
    prompt, own_length = 64, 256
    pool: list[Tensor] = []

    with Processes() as processes, training_kernels():
        sitting = Sitting(arguments.out, {"target": model}, arguments.minutes, processes, muon_lr=0.002, adam_lr=4e-4)
        if arguments.compile:
            compile_layers(model)

        def own_rows(step: int) -> Tensor:
            if not pool:
                count = arguments.own_rows * arguments.refresh
                windows = sampler.batch(step, processes.rank + 1000, count, prompt - 1)
                generator = torch.Generator().manual_seed(step * processes.count + processes.rank)
                with native_kernels():
                    rows = continue_windows(twin, windows, own_length + 1, generator)
                pool.extend(rows.clone().split(arguments.own_rows))
            return pool.pop()

        def train_step(step: int, progress: float) -> tuple[dict[str, float], int]:
            batch = sampler.batch(step, processes.rank, arguments.rows, arguments.length)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            own = own_rows(step)
            mask = loop_mask(own, prompt)[:, 1:]
            logits = model(input_ids=own[:, :-1], use_cache=False).logits
            (arguments.weight * unlikelihood(logits, own[:, 1:], mask)).backward()
            looping = mask.float().mean().item()
            return {"loss": loss.item(), "looping": looping}, batch[:, 1:].numel()

        sitting.run(train_step)
    if processes.rank == 0:
        model.save_pretrained(arguments.out / "target")
        load_tokenizer(arguments.target).save_pretrained(arguments.out / "target")


if __name__ == "__main__":
    main()
