"""A training run spread over sittings: time-based schedule, checkpoints, resume, one log, one or several processes.

Progress is the share of the time budget that has been trained, summed over sittings, so that the learning rate ends
at zero on a busy machine as on a quiet one. Several processes average their gradients through gloo (``torchrun
--nproc-per-node 2 -m ...``): on a CPU that beats threads, which meet at a barrier after every operator.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hybridspec.drafts.distillation.optimizer import MuonAdamW


@dataclass
class Processes:
    """This process among its peers; a single process needs no launcher."""

    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    count: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))

    def __enter__(self) -> "Processes":
        if self.count > 1:
            dist.init_process_group("gloo")
        return self

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            dist.destroy_process_group()

    def average_gradients(self, models: Iterable[nn.Module]) -> None:
        if self.count == 1:
            return
        gradients = [p.grad for m in models for p in m.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def agree(self, value: float) -> float:
        """The value of process 0, everywhere: clocks and signals differ."""
        if self.count == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(tensor, 0)
        return tensor.item()


def learning_rate_scale(step: int, progress: float, warmup_steps: int = 40, decay_share: float = 0.6) -> float:
    """Linear warm-up by steps, then constant, then linear to 3 % over the last ``decay_share`` of the time."""
    return min(1.0, (step + 1) / warmup_steps) * min(1.0, max(0.03, (1 - progress) / decay_share))


class TrainingRun:
    """Runs ``train_step`` until the budget is spent or SIGINT/SIGTERM asks to stop; saves as it goes.

    Args:
        out: folder of ``checkpoint.pt``, ``log.jsonl`` and, at the end, the saved models.
        models: name to model; all are stepped together.
        minutes: the whole budget, over all sittings.
        watch: called after each step with what else would be printed now and then.
    """

    def __init__(
        self,
        out: Path,
        models: dict[str, nn.Module],
        minutes: float,
        processes: Processes,
        save_every: float = 120.0,
        muon_lr: float = 0.02,
        adam_lr: float = 4e-3,
        watch: Callable[[dict], None] | None = None,
    ) -> None:
        self.watch = watch
        self.out, self.models, self.processes, self.save_every = out, models, processes, save_every
        self.budget = 60.0 * minutes
        self.optimizers = {name: MuonAdamW(model, muon_lr, adam_lr) for name, model in models.items()}
        self.step = 0
        self.tokens = 0
        self.trained_seconds = 0.0
        self.stop_asked = False
        self._checkpoint = out / "checkpoint.pt"
        out.mkdir(parents=True, exist_ok=True)
        if self._checkpoint.is_file():
            self._load()

    @property
    def progress(self) -> float:
        return min(1.0, self.trained_seconds / self.budget)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
            self.optimizers[name].load_state_dict(state["optimizers"][name])
        self.step, self.tokens, self.trained_seconds = state["step"], state["tokens"], state["trained_seconds"]
        self._say(f"resumed at step {self.step}, {self.tokens / 1e6:.2f}M tokens, {self.progress:.0%} done")

    def _say(self, text: object) -> None:
        if self.processes.rank == 0 and self.watch is None:
            print(text, flush=True)

    def save(self) -> None:
        """Replaces the checkpoint in one move, so that an interrupt never leaves half a file."""
        if self.processes.rank:
            return
        state = {
            "models": {n: {k: v.detach() for k, v in m.state_dict().items()} for n, m in self.models.items()},
            "optimizers": {n: o.state_dict() for n, o in self.optimizers.items()},
            "step": self.step,
            "tokens": self.tokens,
            "trained_seconds": self.trained_seconds,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def run(self, train_step: Callable[[int, float], tuple[dict[str, float], int]], log_every: float = 30.0) -> None:
        """``train_step(step, progress)`` leaves gradients on the models and returns (losses, tokens it saw)."""
        with self._stop_on_signals():
            self._run(train_step, log_every)
        self.save()
        self._say(f"{'budget spent' if self.progress >= 1 else 'stopped'} at step {self.step}")

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the running step end. Only the main thread may catch them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(name, lambda *_: setattr(self, "stop_asked", True)) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, before, strict=True):
                signal.signal(name, handler)

    def _run(self, train_step: Callable[[int, float], tuple[dict[str, float], int]], log_every: float) -> None:
        averages: dict[str, float] = {}
        begun_at, begun_seconds, begun_tokens = time.time(), self.trained_seconds, self.tokens
        cpu_at = time.process_time()
        logged = saved = begun_at
        fresh = True
        while self.processes.agree(float(self.stop_asked or self.progress >= 1.0)) == 0.0:
            losses, tokens = train_step(self.step, self.progress)
            self.processes.average_gradients(self.models.values())
            scale = learning_rate_scale(self.step, self.progress)
            for name, model in self.models.items():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizers[name].step(scale)
            self.step += 1
            self.tokens += tokens * self.processes.count
            now = time.time()
            if fresh:
                # The first step compiles, which is not training.
                fresh, begun_at, begun_tokens, cpu_at = False, now, self.tokens, time.process_time()
                logged = saved = now
            self.trained_seconds = self.processes.agree(begun_seconds + now - begun_at)
            for name, value in losses.items():
                averages[name] = averages.get(name, value) * 0.9 + value * 0.1
            due = now - logged > log_every
            if due or self.watch is not None:
                speed = (self.tokens - begun_tokens) / max(now - begun_at, 1e-9)
                cpu_seconds = max(time.process_time() - cpu_at, 1e-9)
                row = self._row(averages, speed, (self.tokens - begun_tokens) / self.processes.count / cpu_seconds)
                if self.watch is not None:
                    self.watch(row)
                if due:
                    logged = now
                    self._log(row)
            if now - saved > self.save_every:
                saved = now
                self.save()

    def _row(self, averages: dict[str, float], speed: float, cpu_speed: float) -> dict[str, float]:
        return {
            "minutes": round(self.trained_seconds / 60, 1),
            "progress": round(self.progress, 3),
            "step": self.step,
            "million_tokens": round(self.tokens / 1e6, 3),
            "tokens_per_second": round(speed),
            "tokens_per_cpu_second_per_process": round(cpu_speed),
            **{name: round(value, 4) for name, value in averages.items()},
        }

    def _log(self, row: dict[str, float]) -> None:
        if self.processes.rank:
            return
        with open(self.out / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        self._say(row)
