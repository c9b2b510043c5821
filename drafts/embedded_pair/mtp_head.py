"""Trains a multi-token-prediction head for a frozen Qwen3.5 target: one decoder layer that drafts for it.

    python -m hybridspec.drafts.embedded_pair.mtp_head --target TARGET --data DATA --outputs RUN/outputs.npy \\
        --out RUN/mtp

It learns the target's distributions over corpus text and over the target's own outputs, and its own hidden states as
input as drafting gives them ("training-time test", EAGLE-3, arXiv 2503.01840): the entries of depth s see the keys of
the true entries before, and of the one entry of each depth in between. ``RUN/mtp/checkpoint`` is then a copy of the
target with ``mtp.safetensors`` beside its weights, and the acceptance on held-out prompts is printed.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hybridspec.decoding.loop import decode
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.distillation.output_pool import OutputPool
from hybridspec.drafts.distillation.training_kernels import training_kernels
from hybridspec.drafts.distillation.training_run import Processes, TrainingRun
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.drafts.embedded_pair.target import compile_layers
from hybridspec.drafts.mtp.head import PredictionHead
from hybridspec.drafts.mtp.strategy import MultiTokenPredictionDraft
from hybridspec.drafts.mtp.weights import published_tensors
from hybridspec.runtime.runner import TargetRunner

#: Weight of the loss at each further depth: a draft counts only if those before it were right.
DECAY = 0.7


def make_head(target: PreTrainedModel, seed: int) -> PredictionHead:
    """A fresh head that passes the target's hidden states on: residual branches and the embedding's half start at zero.

    The final norm is the target's, which the shared language-model head was trained with, times 0.3: the target's own
    logits, one token late, are too sure of themselves (loss 6.8 on the embedded target; with random projections 10.1).
    """
    torch.manual_seed(seed)
    head = PredictionHead(target)
    with torch.no_grad():
        # These norms multiply by one plus their weight.
        head.decoder.norm.weight.copy_(0.3 * (1 + target.get_decoder().norm.weight) - 1)
        halves = head.projection.weight.chunk(2, 1)
        halves[0].zero_()
        halves[1].copy_(torch.eye(len(halves[1])))
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return head


def depth_mask(length: int, depth: int) -> Tensor:
    """``[1, 1, length, (depth + 1) length]``, true where entry i of ``depth`` (0 is true hidden states) looks."""
    entries = torch.arange(length)
    past = entries.unsqueeze(0) <= entries.unsqueeze(1) - depth
    between = [entries.unsqueeze(0) == entries.unsqueeze(1) - depth + r for r in range(1, depth + 1)]
    return torch.cat([past, *between], 1)[None, None]


def depth_logits(head: PredictionHead, tokens: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
    """For each depth s, logits ``[B, T - s, vocab]`` of its entries from position s on, as drafting computes them.

    Args:
        tokens: ``[B, T]``, each the one after its hidden state.
        hidden: ``[B, T, d]``, the target's.
    """
    cache = DynamicCache(config=head.config)
    result = []
    for depth in range(depths):
        # Nothing is recurrent in the head, so that mask is never looked at.
        masks = {"full_attention": depth_mask(tokens.shape[1], depth), "linear_attention": None}
        read, following = head(tokens, hidden, cache=cache, attention_mask=masks)
        result.append(head.logits(read[:, depth:]))
        hidden = torch.cat([hidden[:, :1], following[:, :-1]], 1)
    return result


def write_checkpoint(folder: Path, target: Path, model: PreTrainedModel, head: PredictionHead) -> None:
    """A copy of the ``target`` folder that announces the head and holds it in a file of its own."""
    shutil.copytree(target, folder, dirs_exist_ok=True)
    save_file(published_tensors(head, model), folder / "mtp.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)[head.layout.announced] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(checkpoint: Path, workloads: Sequence[Path], k: int, prompts: int, new: int) -> dict[str, dict]:
    """Greedy acceptance on the first prompts of each workload, and the cost of a drafted token in target steps; prints
    each workload as it is done.
    """
    from hybridspec.tuning.workloads.sources import load_workload

    runner = TargetRunner.from_pretrained(checkpoint)
    draft = MultiTokenPredictionDraft(runner)
    results = {}
    for path in workloads:
        speculative, plain = Statistics(), Statistics()
        for prompt in load_workload(path).prompts[:prompts]:
            tokens = runner.encode(prompt.text)
            options = {"max_new_tokens": new, "stop_tokens": frozenset()}
            outputs = [
                [token.id for token in decode(runner, tokens, draft=draft, k=length, statistics=statistics, **options)]
                for length, statistics in ((0, plain), (k, speculative))
            ]
            if outputs[0] != outputs[1]:
                print(f"{path.stem}/{prompt.id}: the output differs from plain decoding", flush=True)
        # The first draft of a prompt reads all of it, and the last may be shorter.
        full = sorted(step.draft_seconds / k for step in speculative.steps if step.drafted == k)
        steps = sorted(step.verify_seconds + step.commit_seconds for step in plain.steps)
        results[path.stem] = {
            "acceptance_length": speculative.acceptance_length,
            "by_position": speculative.acceptance_by_position(),
            "cost_ratio": full[len(full) // 2] / steps[len(steps) // 2],
        }
        print(line(path.stem, **results[path.stem]), flush=True)
    return results


def line(workload: str, acceptance_length: float, by_position: Sequence[float], cost_ratio: float) -> str:
    positions = "  ".join(f"{share:.0%}" for share in by_position)
    return f"{workload:14s} length {acceptance_length:.2f}  cost {cost_ratio:.3f} target steps  by position {positions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True, nargs="+", help="files written by the outputs step")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="time budget over all sittings")
    parser.add_argument("--rows", type=int, default=4, help="corpus windows, and as many output rows, per step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--depths", type=int, default=3, help="drafted tokens that training looks ahead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompts", type=int, default=3, help="held-out prompts per workload to measure")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate for each")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32, local_files_only=True).eval()
    target.requires_grad_(False)
    head = make_head(target, arguments.seed)
    corpus = WindowSampler(arguments.data, MIXTURE, arguments.seed)
    outputs = OutputPool(arguments.outputs, arguments.seed)
    weights = [DECAY**depth for depth in range(arguments.depths)]
    with Processes() as processes, training_kernels():
        run = TrainingRun(arguments.out, {"head": head}, arguments.minutes, processes)
        if arguments.compile:
            compile_layers(target)

        def train_step(step: int, progress: float) -> tuple[dict[str, float], int]:
            parts = [s.batch(step, processes.rank, arguments.rows, arguments.length) for s in (corpus, outputs)]
            inputs = torch.cat(parts)[:, :-1]
            with torch.no_grad():
                hidden = target.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state
                logits = head.logits(hidden[:, 1:])
                p, best = logits.softmax(-1), logits.argmax(-1)
            loss, report = torch.zeros(()), {}
            drafted = depth_logits(head, inputs[:, 1:], hidden[:, :-1], arguments.depths)
            for depth, (weight, q) in enumerate(zip(weights, drafted, strict=True)):
                # Cross-entropy to the target's distribution: its gradient is that of the Kullback-Leibler divergence.
                loss = loss - weight / sum(weights) * (p[:, depth:] * q.log_softmax(-1)).sum(-1).mean()
                report[f"agreement_{depth + 1}"] = (q.argmax(-1) == best[:, depth:]).float().mean().item()
            loss.backward()
            return {"loss": loss.item(), **report}, inputs.numel()

        run.run(train_step)
    if processes.rank == 0:
        from hybridspec import embedded

        checkpoint = arguments.out / "checkpoint"
        write_checkpoint(checkpoint, arguments.target, target, head)
        workloads = list(embedded.workload_files().values())
        results = measure(checkpoint, workloads, arguments.depths + 1, arguments.prompts, arguments.new)
        (arguments.out / "acceptance.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
