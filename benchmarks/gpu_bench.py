"""What the sections of the GPU benchmark share: a model at real dimensions, its runners, clocks and checks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridspec.runtime.runner import TargetRunner
from hybridspec.runtime.session import Session
from hybridspec.runtime.static_runner import StaticRunner

#: Dimensions as in Qwen3.5-27B, which has 64 of these layers.
REAL = {
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Largest difference, relative to the root mean square of what is compared, that rounding explains. A state that holds
#: one token too many is off by 0.1 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class WrongResultError(AssertionError):
    """What is about to be timed computes something else than its twin."""


@dataclass
class GpuBench:
    """Settings, results so far, and the model that most sections share."""

    device: torch.device
    smoke: bool
    layers: int
    prompt: int
    repeats: int
    longest: int
    console: Console
    dtype: torch.dtype = torch.bfloat16
    results: dict[str, Any] = field(default_factory=dict)
    _model: PreTrainedModel | None = None
    _runners: dict[str, TargetRunner] = field(default_factory=dict)
    _sessions: dict[str, Session] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dimensions(self) -> dict[str, int]:
        return SMALL if self.smoke else REAL

    @property
    def paths(self) -> tuple[str, ...]:
        return ("eager", "static", "graph") if self.is_cuda else ("eager", "static")

    @property
    def capacity(self) -> int:
        return self.prompt + (128 if self.smoke else 1024)

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            config = CONFIG_MAPPING["qwen3_5_text"](
                **self.dimensions,
                num_hidden_layers=self.layers,
                tie_word_embeddings=False,
                max_position_embeddings=32_768,
            )
            torch.manual_seed(0)
            with torch.device(self.device):
                self._model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
        return self._model

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.dimensions["vocab_size"], count).tolist()

    def runner(self, name: str) -> TargetRunner:
        """By path, or rollback mode of an eager runner."""
        if name not in self._runners:
            if name in ("static", "graph"):
                runner = StaticRunner(self.model, capacity=self.capacity, graphs=name == "graph")
            else:
                runner = TargetRunner(self.model, rollback="tape" if name == "eager" else name)
            self._runners[name] = runner
        return self._runners[name]

    def session(self, name: str) -> Session:
        """At a prompt, and kept for the sections that follow; see :meth:`back`."""
        if name not in self._sessions:
            self._sessions[name] = self.runner(name).start(self.tokens(self.prompt))
        session = self._sessions[name]
        if session.room < self.longest + 2 or session.length > self.capacity - 8 * self.longest:
            session.close()
            self._sessions[name] = session = self.runner(name).start(self.tokens(self.prompt))
        return session

    def forget_sessions(self) -> None:
        """After a failure: what they hold may be wrong."""
        self._sessions.clear()

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def time(self, function: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> dict[str, float]:
        """Milliseconds of wall clock until the device has finished; ``before`` runs untimed each time."""
        times = []
        for repeat in range(-max(2, self.repeats // 5), self.repeats):
            before()
            self.wait()
            start = time.perf_counter()
            function()
            self.wait()
            if repeat >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        low, median, high = np.quantile(times, [0.25, 0.5, 0.75])
        return {"milliseconds": float(median), "quartile_1": float(low), "quartile_3": float(high)}

    def check(self, actual: Tensor, expected: Tensor, what: str, tolerance: float | None = None) -> float:
        """Relative error.

        Raises:
            WrongResultError: it is larger than rounding explains.
        """
        actual, expected = actual.float(), expected.float()
        scale = expected.square().mean().sqrt().clamp(min=1e-9)
        error = float(((actual - expected).square().mean().sqrt() / scale).cpu())
        limit = TOLERANCE[self.dtype] if tolerance is None else tolerance
        # Written so that a NaN fails.
        if not error <= limit:
            raise WrongResultError(f"{what}: off by {error:.2g} of its size, more than {limit:.2g}")
        return error

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
