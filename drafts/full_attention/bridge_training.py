"""Trains bridges: the target is frozen, and its hidden states at the cuts and its output distribution are the goal.

A training step runs the target over some windows of text, and all drafting steps of the same windows in one pass
(:mod:`hybridspec.drafts.full_attention.block_pass`). The target's pass costs as much as the rest, so each serves
several steps.
"""

import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from hybridspec.drafts.distillation.text_windows import TextWindows
from hybridspec.drafts.distillation.training_run import Processes, TrainingRun
from hybridspec.drafts.full_attention.block_pass import Truth, draft_pass, target_pass
from hybridspec.drafts.full_attention.bridges import (
    SETTINGS,
    BridgeSettings,
    check_sizes,
    describe,
    make_bridges,
    read_settings,
    save_bridges,
)
from hybridspec.drafts.full_attention.reduced import ReducedModel
from hybridspec.errors import InputError
from hybridspec.runtime.runner import TargetRunner

#: Drafted tokens of a block in training.
BLOCK = 4
#: Share of the time in which each bridge learns alone, which is cheaper by far.
ALONE = 0.3
#: Passes of the target that are kept, and steps that each serves.
POOL, REUSE = 8, 3


def train_bridges(
    target: TargetRunner,
    corpus: Path,
    out: Path,
    *,
    minutes: float = 15.0,
    window: int = 4,
    inner: int = 176,
    rows: int = 8,
    length: int = 256,
    seed: int = 0,
) -> TrainingRun:
    """Trains until ``minutes`` are spent over all calls, or until SIGINT; what was trained is saved either way.

    Args:
        corpus: see :class:`~hybridspec.drafts.distillation.text_windows.TextWindows`.
        out: folder of the bridges; a checkpoint in it is gone on from.
        window, inner: see :class:`~hybridspec.drafts.full_attention.bridges.BridgeSettings`.
        rows, length: windows of text per step, and their tokens.

    Raises:
        InputError: a value is out of range, or ``out`` holds bridges of another kind.
        UnsupportedLayerError: the target cannot draft this way.
    """
    check_sizes(window, inner)
    if length > target.max_length or length < 2 * BLOCK:
        raise InputError(f"length must be from {2 * BLOCK} to the target's context of {target.max_length}")
    settings = describe(target, window, inner)
    check_folder(out, settings)
    documents = TextWindows(corpus, target.tokenizer, seed)
    torch.manual_seed(seed)
    target.model.requires_grad_(False)
    bridges = make_bridges(settings).to(target.device)
    reduced = ReducedModel(target, bridges, window)
    set_gains(reduced, bridges, documents.windows(0, rows, length).to(target.device))
    run = TrainingRun(out, {"bridges": bridges}, minutes, Processes())
    save_bridges(out, bridges, settings)
    last: dict[str, float] = {}
    step_of = training_step(reduced, bridges, documents, rows, length, seed, last)
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.run(step_of)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        settings.training = {
            "corpus": sorted(documents.files),
            "tokens": run.tokens,
            "steps": run.step,
            "minutes": round(run.trained_seconds / 60, 1),
            "rows": rows,
            "length": length,
            "seed": seed,
            "last_step": {name: round(value, 4) for name, value in last.items()},
            "versions": {
                "hybridspec": version("hybridspec"),
                "transformers": transformers.__version__,
                "torch": torch.__version__.split("+")[0],
            },
        }
        save_bridges(out, bridges, settings)
    return run


def check_folder(out: Path, settings: BridgeSettings) -> None:
    """Raises :class:`InputError` if ``out`` holds bridges that these settings cannot go on from."""
    if not (out / SETTINGS).is_file():
        return
    before = asdict(read_settings(out))
    for name, wanted in asdict(settings).items():
        if name != "training" and before[name] != wanted:
            raise InputError(
                f'{out / SETTINGS}: "{name}" is {before[name]}, and you ask for {wanted}. Choose another --out, or '
                "the same settings to go on."
            )


def training_step(
    reduced: ReducedModel,
    bridges: nn.ModuleList,
    documents: TextWindows,
    rows: int,
    length: int,
    seed: int,
    last: dict[str, float],
) -> Callable[[int, float], tuple[dict[str, float], int]]:
    """What :meth:`TrainingRun.run` calls; ``last`` receives the losses of each step."""
    pool: list[tuple[Tensor, Truth]] = []

    def step(number: int, progress: float) -> tuple[dict[str, float], int]:
        rng = random.Random(seed * 1_000_003 + number)
        fresh = not pool or number % REUSE == 0
        if fresh:
            ids = documents.windows(number, rows, length).to(reduced.target.device)
            pool.append((ids, target_pass(reduced, ids)))
            del pool[:-POOL]
        # The newest is taken at once, and others come round again.
        ids, truth = pool[-1] if fresh else rng.choice(pool)
        if progress < ALONE:
            losses = alone(reduced, bridges, ids, truth)
        else:
            # The hidden states still show the way; in the end only the output counts.
            losses = together(reduced, ids, truth, rng.randrange(BLOCK), (1 - progress) / (1 - ALONE))
        last.update(losses)
        return losses, ids.numel() if fresh else 0

    return step


def alone(reduced: ReducedModel, bridges: nn.ModuleList, ids: Tensor, truth: Truth) -> dict[str, float]:
    """Each bridge from the target's own hidden states before its run to those behind it. Leaves gradients."""
    with reduced.context(ids) as context:
        errors = [
            (bridge(before, context) - after).square().mean() / (after - before).var()
            for bridge, (before, after) in zip(bridges, truth.cuts, strict=True)
        ]
    error = torch.stack(errors).mean()
    error.backward()
    return {"bridge_error": error.item()}


def together(reduced: ReducedModel, ids: Tensor, truth: Truth, first: int, weight: float) -> dict[str, float]:
    """The draft's output and, by ``weight``, its hidden states against the target's. Leaves gradients."""
    logits, cuts = draft_pass(reduced, ids, truth, BLOCK, first)
    p, q = truth.logits.float().softmax(-1), logits.float().log_softmax(-1)
    # Cross-entropy to the target's distribution: its gradient is that of the Kullback-Leibler divergence.
    cross_entropy = -(p * q).sum(-1).mean()
    errors = [
        (ours - theirs).square().mean() / theirs.var() for (_, ours), (_, theirs) in zip(cuts, truth.cuts, strict=True)
    ]
    cut_error = torch.stack(errors).mean()
    (cross_entropy + weight * cut_error).backward()
    with torch.no_grad():
        return {
            "cross_entropy": cross_entropy.item(),
            "cut_error": cut_error.item(),
            "agreement": (q.argmax(-1) == p.argmax(-1)).float().mean().item(),
            "acceptance": torch.minimum(p, q.exp()).sum(-1).mean().item(),
        }


@torch.no_grad()
def set_gains(reduced: ReducedModel, bridges: nn.ModuleList, ids: Tensor) -> None:
    """Starts each bridge's gain at what its run adds to the hidden states, which grow from layer to layer."""
    for bridge, (before, after) in zip(bridges, target_pass(reduced, ids).cuts, strict=True):
        bridge.gain.fill_((after - before).square().mean().sqrt())
