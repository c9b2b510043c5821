"""Trains the embedded target: a deep, narrow Qwen3.5 text model (gated delta rule and full attention, 3 to 1).

    torchrun --nproc-per-node 2 -m hybridspec.drafts.embedded_pair.target --data DATA --out RUN --minutes 120

Interrupt it at will; the same command goes on from the checkpoint. A finished model is trained further with
``--continue-from RUN/target --rate 0.5 --seed N`` and a new ``--out``.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hybridspec.drafts.distillation.training_kernels import training_kernels
from hybridspec.drafts.distillation.training_run import Processes, TrainingRun
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer


def make_config(layers: int, vocab_size: int = 2048, intermediate_size: int = 320) -> Qwen3_5TextConfig:
    """Width 128, linear heads of 64 (vLLM's CPU kernels take 64 and 128 only), attention heads of 32.

    A two-layer model gets one linear and one full-attention layer, deeper ones the family's 3 to 1.
    """
    interval = min(4, layers)
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        layer_types=["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)],
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def make_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """A fresh model whose residual branches start at zero, which trains deep stacks quicker."""
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return model


def compile_layers(model: Qwen3_5ForCausalLM) -> None:
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def window_shape(progress: float, rows: int, length: int) -> tuple[int, int]:
    """The last tenth trains on windows of four times the length, for the long-context workload."""
    return (max(1, rows // 4), 4 * length) if progress > 0.9 else (rows, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by the data step")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120.0, help="time budget over all sittings")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8, help="windows per process and step")
    parser.add_argument("--length", type=int, default=512, help="tokens per window, a multiple of 32")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continue-from", type=Path, help="saved model to train further, with a fresh optimizer")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on learning rates; 0.5 to go on")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    sampler = WindowSampler(arguments.data, MIXTURE, arguments.seed)
    tokenizer = load_tokenizer(arguments.data / "tokenizer")
    if arguments.continue_from is None:
        model = make_model(make_config(arguments.layers, len(tokenizer)), arguments.seed)
    else:
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(arguments.continue_from, **options).train()
    with Processes() as processes, training_kernels():
        rates = {"muon_lr": 0.02 * arguments.rate, "adam_lr": 4e-3 * arguments.rate}
        run = TrainingRun(arguments.out, {"target": model}, arguments.minutes, processes, **rates)
        if arguments.compile:
            compile_layers(model)

        def train_step(step: int, progress: float) -> tuple[dict[str, float], int]:
            rows, length = window_shape(progress, arguments.rows, arguments.length)
            batch = sampler.batch(step, processes.rank, rows, length)
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            return {"loss": loss.item()}, rows * length

        run.run(train_step)
    if processes.rank == 0:
        model.save_pretrained(arguments.out / "target")
        tokenizer.save_pretrained(arguments.out / "target")


if __name__ == "__main__":
    main()
