"""One measurement: plain and speculative decoding of the same prompts, interleaved, from snapshots."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from hybridspec.decoder import Statistics, Step, check_length, continue_decoding, open_pair
from hybridspec.drafts.base import Draft
from hybridspec.drafts.length import DraftLength, FixedLength
from hybridspec.errors import SessionError
from hybridspec.runner import TargetRunner
from hybridspec.sampling import Sampling


@dataclass(frozen=True)
class Run:
    """One generation: its tokens, the loop's steps, and its time without prefill."""

    tokens: list[int]
    steps: list[Step]
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Pair:
    """Plain and speculative decoding of one prompt, measured right after each other."""

    prompt_id: str
    plain: Run
    speculative: Run


class PreparedPrompt:
    """A prompt prefilled on target and draft; every run starts from the same snapshot. Close it, or use it as a
    context manager.
    """

    def __init__(
        self, target: TargetRunner, draft: Draft, prompt_id: str, tokens: Sequence[int], sampling: Sampling, seed: int
    ):
        self.id, self.tokens, self.sampling, self.seed = prompt_id, list(tokens), sampling, seed
        self._target = target
        self._generator = torch.Generator().manual_seed(seed)
        with ExitStack() as stack:
            pair = open_pair(target, draft, self.tokens, sampling, self._generator)
            self.session, self.drafting = stack.enter_context(pair)
            self.target_mark, self._draft_mark = self.session.snapshot(), self.drafting.snapshot()
            self._stack = stack.pop_all()

    def __enter__(self) -> "PreparedPrompt":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rewind(self) -> None:
        self.session.restore(self.target_mark)
        self.drafting.restore(self._draft_mark)
        self._generator.manual_seed(self.seed)

    def run(self, k: int | DraftLength, max_new_tokens: int) -> Run:
        length = FixedLength(k) if isinstance(k, int) else k
        check_length(self._target, self.tokens, max_new_tokens, length.longest)
        self.rewind()
        statistics = Statistics()
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = [
            token.id
            for token in continue_decoding(
                self.session,
                self.drafting if length.longest else None,
                self.tokens[-1],
                length=length,
                max_new_tokens=max_new_tokens,
                sampling=self.sampling,
                generator=self._generator,
                stop_tokens=self._target.stop_tokens,
                statistics=statistics,
            )
        ]
        return Run(tokens, statistics.steps, time.perf_counter() - wall, time.process_time() - cpu)


def measure_pair(prompt: PreparedPrompt, k: int | DraftLength, max_new_tokens: int, speculative_first: bool) -> Pair:
    """Both runs of one prompt; the order alternates between calls so that drift favours neither.

    Raises:
        SessionError: greedy outputs differ by more than a rounding tie; that is a bug, not a measurement.
    """
    order = (k, 0) if speculative_first else (0, k)
    runs = [prompt.run(each, max_new_tokens) for each in order]
    speculative, plain = runs if speculative_first else reversed(runs)
    if prompt.sampling.greedy and speculative.tokens != plain.tokens:
        _check_tie(prompt, plain.tokens, speculative.tokens)
    return Pair(prompt.id, plain, speculative)


#: Greedy choices whose logits lie closer than this are ties that rounding may break either way (fp32).
TIE_MARGIN = 1e-3


def _check_tie(prompt: PreparedPrompt, plain: list[int], speculative: list[int]) -> None:
    position = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    if position is None:
        raise SessionError(f"prompt {prompt.id}: greedy outputs have {len(plain)} and {len(speculative)} tokens")
    prompt.rewind()
    logits = prompt.session.verify([prompt.tokens[-1], *plain[:position]])[-1]
    margin = abs(float(logits[plain[position]] - logits[speculative[position]]))
    prompt.rewind()
    if margin > TIE_MARGIN:
        raise SessionError(
            f"prompt {prompt.id}: speculative output leaves the plain one at token {position}, "
            f"logit margin {margin:.2g}"
        )


def speedup(pairs: Sequence[Pair], clock: str = "wall_seconds") -> float:
    """Time per token of plain over speculative decoding, prompts pooled."""
    return float(_ratio(_table(pairs, clock)))


def speedup_interval(
    pairs: Sequence[Pair], clock: str = "wall_seconds", level: float = 0.9, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap interval of :func:`speedup` over prompts, the pairing kept.

    One prompt tells nothing about others, so the interval then reaches from no gain to what was seen.
    """
    table = _table(pairs, clock)
    if len(table) == 1:
        seen = float(_ratio(table))
        return min(1.0, seen), max(1.0, seen)
    rng = np.random.default_rng(seed)
    samples = _ratio(table[rng.integers(0, len(table), (2000, len(table)))])
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _table(pairs: Sequence[Pair], clock: str) -> np.ndarray:
    """``[prompts, 4]``: plain seconds and tokens, speculative seconds and tokens."""
    return np.array(
        [
            [getattr(r, clock) if what else len(r.tokens) for r in (p.plain, p.speculative) for what in (1, 0)]
            for p in pairs
        ]
    )


def _ratio(table: np.ndarray) -> np.ndarray:
    plain_seconds, plain_tokens, seconds, tokens = np.moveaxis(table.sum(-2), -1, 0)
    return (plain_seconds / plain_tokens) / (seconds / tokens)
