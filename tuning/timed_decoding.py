"""One measurement: plain and speculative decoding of the same prompts, interleaved, from snapshots."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice, zip_longest

import torch

from hybridspec.decoding.draft import Draft
from hybridspec.decoding.loop import Token, check_length, continue_decoding, open_pair
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.engines.audit.verdict import NEAR_TIE
from hybridspec.errors import SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.base import Sample


@dataclass(frozen=True)
class PairedGenerations:
    """Plain and speculative decoding of one prompt, measured in turn."""

    prompt_id: str
    plain: TimedGeneration
    speculative: TimedGeneration

    @property
    def sample(self) -> Sample:
        return Sample.of(self.prompt_id, self.plain, self.speculative)


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
    ) -> None:
        self.id, self.tokens, self.sampling, self.seed = prompt_id, list(tokens), sampling, seed
        self._target = target
        self._generator = torch.Generator().manual_seed(seed)
        with ExitStack() as stack:
            options = DecodeOptions(sampling=sampling, generator=self._generator)
            pair = open_pair(target, draft, self.tokens, options)
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

    def begin(self, options: DecodeOptions) -> "RunningDecoding":
        """A generation from the snapshot on, nothing of it decoded yet. It ends the one before.

        Sampling and random numbers are the prompt's own, whatever the options say.
        """
        check_length(self._target, self.tokens, options.max_new_tokens, options.length.demanded)
        self.rewind()
        options = replace(options, sampling=self.sampling, generator=self._generator)
        drafting, statistics = self.drafting if options.length.longest else None, Statistics()
        stream = continue_decoding(self.session, drafting, self.tokens[-1], options, statistics)
        return RunningDecoding(stream, statistics, self._target.device)

    def run(self, options: DecodeOptions) -> TimedGeneration:
        decoding = self.begin(options)
        decoding.advance(options.max_new_tokens)
        return decoding.result


class RunningDecoding:
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
    def result(self) -> TimedGeneration:
        return TimedGeneration(self._tokens, self._statistics.steps, self._wall, self._cpu)


@dataclass(frozen=True)
class PreparedDecoding:
    """A prepared prompt and how to decode it."""

    prompt: PreparedPrompt
    options: DecodeOptions

    def begin(self) -> RunningDecoding:
        return self.prompt.begin(self.options)

    def run(self) -> TimedGeneration:
        return self.prompt.run(self.options)


#: Tokens that one of several decodes before it is the next one's turn.
SLICE = 2


def in_turn(decodings: Sequence[RunningDecoding], order: random.Random) -> list[TimedGeneration]:
    """Runs generations of different prepared prompts slice by slice in turn, in random order: a machine that is slow
    for a second is slow for all of them.
    """
    going = list(decodings)
    while going:
        order.shuffle(going)
        going = [decoding for decoding in going if decoding.advance(SLICE)]
    return [decoding.result for decoding in decodings]


def measure_round(
    plain: PreparedPrompt, decodings: Sequence[PreparedDecoding], order: random.Random
) -> list[PairedGenerations]:
    """Each of several decodings once on one prompt, in turn with plain decoding and with those of other prepared
    prompts; those that share one come after each other, in random order. None may use ``plain`` itself.

    Raises:
        SessionError: a greedy output differs from plain decoding's by more than a rounding tie; that is a bug, not a
            measurement.
    """
    waiting: dict[int, list[int]] = {}
    for index in order.sample(range(len(decodings)), len(decodings)):
        waiting.setdefault(id(decodings[index].prompt), []).append(index)
    pairs: dict[int, PairedGenerations] = {}
    for together in zip_longest(*waiting.values()):
        indices = [index for index in together if index is not None]
        speculative = [decodings[index] for index in indices]
        alone = DecodeOptions(max_new_tokens=speculative[0].options.max_new_tokens)
        running = [plain.begin(alone), *(decoding.begin() for decoding in speculative)]
        reference, *generations = in_turn(running, order)
        for index, generation in zip(indices, generations, strict=True):
            if plain.sampling.greedy and generation.tokens != reference.tokens:
                check_tie(plain, reference.tokens, generation.tokens)
            pairs[index] = PairedGenerations(plain.id, reference, generation)
    return [pairs[index] for index in range(len(decodings))]


def measure_pair(plain: PreparedPrompt, decoding: PreparedDecoding, order: random.Random) -> PairedGenerations:
    """:func:`measure_round` of a single decoding."""
    (pair,) = measure_round(plain, [decoding], order)
    return pair


#: Greedy choices whose logits lie closer than this are ties that rounding may break either way. Our own passes in fp32
#: differ by less than those of two engines.
TIE_MARGIN = NEAR_TIE | {"float32": 1e-3}


def check_tie(prompt: PreparedPrompt, plain: Sequence[int], speculative: Sequence[int]) -> None:
    """Raises :class:`SessionError` unless the first difference is one that rounding explains."""
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
