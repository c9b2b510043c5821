"""One measurement: plain and speculative decoding of the same prompts, interleaved, from snapshots."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, zip_longest

import torch

from hybridspec.decoding.acceptance import Verification
from hybridspec.decoding.draft import Draft
from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.loop import Token, check_length, continue_decoding, open_pair
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics, Step
from hybridspec.drafts.full_attention.segments import SegmentedVerification
from hybridspec.engines.audit.verdict import NEAR_TIE
from hybridspec.errors import SessionError
from hybridspec.runtime.runner import TargetRunner


@dataclass(frozen=True)
class Run:
    """One generation: its tokens, the loop's steps, and its time without prefill."""

    tokens: list[int]
    steps: list[Step]
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Pair:
    """Plain and speculative decoding of one prompt, measured in turn."""

    prompt_id: str
    plain: Run
    speculative: Run


class PreparedPrompt:
    """A prompt prefilled on target and draft; every run starts from the same snapshot. Close it, or use it as a
    context manager. Without a draft it decodes plainly.
    """

    def __init__(
        self,
        target: TargetRunner,
        draft: Draft | None,
        prompt_id: str,
        tokens: Sequence[int],
        sampling: Sampling,
        seed: int,
    ):
        self.id, self.tokens, self.sampling, self.seed = prompt_id, list(tokens), sampling, seed
        self._target = target
        self._generator = torch.Generator().manual_seed(seed)
        with ExitStack() as stack:
            pair = open_pair(target, draft, self.tokens, sampling, self._generator)
            self.session, self.drafting = stack.enter_context(pair)
            self.target_mark = self.session.snapshot()
            self._draft_mark = self.drafting.snapshot() if self.drafting else None
            self._stack = stack.pop_all()

    def __enter__(self) -> "PreparedPrompt":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rewind(self) -> None:
        self.session.restore(self.target_mark)
        if self.drafting:
            self.drafting.restore(self._draft_mark)
        self._generator.manual_seed(self.seed)

    def begin(
        self,
        length: DraftLength,
        max_new_tokens: int,
        segments: SegmentedVerification | None = None,
        verification: Verification = "token",
    ) -> "Decoding":
        """A generation from the snapshot on, nothing of it decoded yet. It ends the one before."""
        check_length(self._target, self.tokens, max_new_tokens, length.demanded)
        self.rewind()
        statistics = Statistics()
        stream = continue_decoding(
            self.session,
            self.drafting if length.longest else None,
            self.tokens[-1],
            length=length,
            max_new_tokens=max_new_tokens,
            sampling=self.sampling,
            verification=verification,
            segments=segments,
            generator=self._generator,
            stop_tokens=self._target.stop_tokens,
            statistics=statistics,
        )
        return Decoding(stream, statistics, self._target.device)

    def run(
        self,
        k: int | DraftLength,
        max_new_tokens: int,
        segments: SegmentedVerification | None = None,
        verification: Verification = "token",
    ) -> Run:
        length = FixedLength(k) if isinstance(k, int) else k
        decoding = self.begin(length, max_new_tokens, segments, verification)
        decoding.advance(max_new_tokens)
        return decoding.run


class Decoding:
    """A generation that goes on piece by piece; its clocks run only while it does."""

    def __init__(self, stream: Iterator[Token], statistics: Statistics, device: torch.device) -> None:
        self._stream, self._statistics, self._device = stream, statistics, device
        self._tokens: list[int] = []
        self._wall = self._cpu = 0.0

    def advance(self, count: int) -> bool:
        """Up to ``count`` more tokens; whether there were as many."""
        before = len(self._tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        self._tokens += (token.id for token in islice(self._stream, count))
        if self._device.type == "cuda":
            # What is still queued belongs to this clock, not to the next one's.
            torch.cuda.synchronize(self._device)
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu
        return len(self._tokens) == before + count

    @property
    def run(self) -> Run:
        return Run(self._tokens, self._statistics.steps, self._wall, self._cpu)


@dataclass(frozen=True)
class Contender:
    """One way of decoding a prepared prompt."""

    prompt: PreparedPrompt
    length: DraftLength
    segments: SegmentedVerification | None = None
    verification: Verification = "token"

    def begin(self, max_new_tokens: int) -> Decoding:
        return self.prompt.begin(self.length, max_new_tokens, self.segments, self.verification)

    def run(self, max_new_tokens: int) -> Run:
        return self.prompt.run(self.length, max_new_tokens, self.segments, self.verification)


#: Tokens that one of several decodes before it is the next one's turn.
SLICE = 2


def in_turn(decodings: Sequence[Decoding], order: random.Random) -> list[Run]:
    """Runs generations of different prepared prompts slice by slice in turn, in random order: a machine that is slow
    for a second is slow for all of them.
    """
    going = list(decodings)
    while going:
        order.shuffle(going)
        going = [decoding for decoding in going if decoding.advance(SLICE)]
    return [decoding.run for decoding in decodings]


def measure_round(
    plain: PreparedPrompt, contenders: Sequence[Contender], max_new_tokens: int, order: random.Random
) -> list[Pair]:
    """Every contender once on one prompt, each in turn with plain decoding and with contenders of other prepared
    prompts; those that share one come after each other, in random order. None may use ``plain`` itself.

    Raises:
        SessionError: a greedy output differs from plain decoding's by more than a rounding tie; that is a bug, not a
            measurement.
    """
    alone = Contender(plain, FixedLength(0))
    waiting: dict[int, list[int]] = {}
    for index in order.sample(range(len(contenders)), len(contenders)):
        waiting.setdefault(id(contenders[index].prompt), []).append(index)
    pairs: dict[int, Pair] = {}
    for together in zip_longest(*waiting.values()):
        indices = [index for index in together if index is not None]
        ways = [alone, *(contenders[index] for index in indices)]
        reference, *runs = in_turn([way.begin(max_new_tokens) for way in ways], order)
        pairs |= {index: _pair(plain, reference, run) for index, run in zip(indices, runs, strict=True)}
    return [pairs[index] for index in range(len(contenders))]


def measure_pair(plain: PreparedPrompt, contender: Contender, max_new_tokens: int, order: random.Random) -> Pair:
    """:func:`measure_round` of a single contender."""
    (pair,) = measure_round(plain, [contender], max_new_tokens, order)
    return pair


def _pair(plain: PreparedPrompt, reference: Run, run: Run) -> Pair:
    if plain.sampling.greedy and run.tokens != reference.tokens:
        _check_tie(plain, reference.tokens, run.tokens)
    return Pair(plain.id, reference, run)


#: Greedy choices whose logits lie closer than this are ties that rounding may break either way. Our own passes in fp32
#: differ by less than those of two engines.
TIE_MARGIN = NEAR_TIE | {"float32": 1e-3}


def _check_tie(prompt: PreparedPrompt, plain: list[int], speculative: list[int]) -> None:
    position = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    if position is None:
        raise SessionError(f"prompt {prompt.id}: greedy outputs have {len(plain)} and {len(speculative)} tokens")
    prompt.rewind()
    logits = prompt.session.verify([prompt.tokens[-1], *plain[:position]])[-1]
    margin = abs(float(logits[plain[position]] - logits[speculative[position]]))
    prompt.rewind()
    if margin > TIE_MARGIN.get(str(logits.dtype).removeprefix("torch."), max(TIE_MARGIN.values())):
        raise SessionError(
            f"prompt {prompt.id}: speculative output leaves the plain one at token {position}, "
            f"logit margin {margin:.2g}"
        )
