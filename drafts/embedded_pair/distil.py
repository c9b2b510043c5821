"""Trains the embedded drafts on the trained target's distributions, over corpus text and the target's own outputs.

    torchrun --nproc-per-node 2 -m hybridspec.drafts.embedded_pair.distil --target RUN/target --data DATA \
        --outputs RUN/outputs.npy --out RUN/drafts --minutes 25

All drafts learn from one forward pass of the frozen target. They start from its embeddings and final norm.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from hybridspec.drafts.distillation.logit_distillation import learn, target_logits
from hybridspec.drafts.distillation.output_pool import OutputPool
from hybridspec.drafts.distillation.training_kernels import training_kernels
from hybridspec.drafts.distillation.training_run import Processes, TrainingRun
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.drafts.embedded_pair.target import compile_layers, make_config, make_model
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer

#: Name -> (layers, intermediate size). On a CPU a wide feed-forward costs a draft step next to nothing.
DRAFTS = {"draft-2-layers": (2, 512), "draft-4-layers": (4, 384)}


def make_draft(target: Qwen3_5ForCausalLM, layers: int, intermediate_size: int, seed: int) -> Qwen3_5ForCausalLM:
    """A fresh draft with the target's embeddings, and its final norm, which scales what the head reads."""
    draft = make_model(make_config(layers, target.config.vocab_size, intermediate_size), seed)
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight)
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True, nargs="+", help="files written by the outputs step")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0, help="time budget over all sittings")
    parser.add_argument(
        "--rows", type=int, default=4, help="corpus windows, and as many output rows, per process and step"
    )
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32, local_files_only=True).eval()
    target.requires_grad_(False)
    drafts = {n: make_draft(target, *shape, arguments.seed + i) for i, (n, shape) in enumerate(DRAFTS.items())}
    corpus = WindowSampler(arguments.data, MIXTURE, arguments.seed)
    outputs = OutputPool(arguments.outputs, arguments.seed)
    with Processes() as processes, training_kernels():
        run = TrainingRun(arguments.out, drafts, arguments.minutes, processes)
        if arguments.compile:
            for model in (target, *drafts.values()):
                compile_layers(model)

        def train_step(step: int, progress: float) -> tuple[dict[str, float], int]:
            parts = [s.batch(step, processes.rank, arguments.rows, arguments.length) for s in (corpus, outputs)]
            inputs = torch.cat(parts)[:, :-1]
            return learn(drafts, [(inputs, target_logits(target, inputs))], len(inputs)), inputs.numel()

        run.run(train_step)
    if processes.rank == 0:
        tokenizer = load_tokenizer(arguments.target)
        for name, draft in drafts.items():
            draft.save_pretrained(arguments.out / name)
            tokenizer.save_pretrained(arguments.out / name)


if __name__ == "__main__":
    main()
