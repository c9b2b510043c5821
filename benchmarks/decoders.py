"""Decoders of a prompt, ours and others, each on its own: what a process of :mod:`benchmarks.decoder_process` runs.

They differ in what they can separate. Ours and the hand-written loops know when their prefill ends. transformers'
``generate`` tells when its first token is there, so it is timed from then on, for one token less. economize prefills
its draft only after the first target pass, so it is timed from the end of its second pass on.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.transformers_model import TransformersModel
from hybridspec.decoding.step import Step
from hybridspec.decoding.timed_generation import TimedGeneration

#: Wall and CPU seconds.
Moment = tuple[float, float]


def now() -> Moment:
    return time.perf_counter(), time.process_time()


def timed(
    tokens: list[int], begun: Moment, timed_from: Moment, untimed: int = 0, steps: Sequence[tuple[int, int]] = ()
) -> TimedGeneration:
    """Of a generation that ends now.

    Args:
        untimed: tokens that were there at ``timed_from``.
        steps: (drafted, accepted).
    """
    (wall, cpu), (since, cpu_since) = now(), timed_from
    loop = [Step(drafted, accepted) for drafted, accepted in steps]
    return TimedGeneration(tokens, loop, wall - since, cpu - cpu_since, untimed, since - begun[0])


class Decoder(ABC):
    """Loaded once with the folders of the pair, then decodes greedily as often as it is asked to."""

    @abstractmethod
    def __init__(self, target: Path, draft: Path) -> None: ...

    @abstractmethod
    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration: ...


class Ours(Decoder):
    """hybridspec; K = 0 is its plain decoding."""

    options: dict[str, object] = {}

    def __init__(self, target: Path, draft: Path) -> None:
        from hybridspec.drafts.same_architecture import SameArchitectureDraft
        from hybridspec.runtime.runner import TargetRunner

        self.target = TargetRunner.from_pretrained(target, **self.options)
        self.draft = SameArchitectureDraft(TargetRunner.from_pretrained(draft, **self.options))

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        from hybridspec.decoding.draft_length import FixedLength
        from hybridspec.decoding.options import DecodeOptions
        from hybridspec.decoding.sampling import Sampling
        from hybridspec.tuning.timed_decoding import PreparedPrompt

        begun, length = time.perf_counter(), FixedLength(k)
        with PreparedPrompt(self.target, self.draft if k else None, "", prompt, Sampling(), 0) as prepared:
            prefilled = time.perf_counter() - begun
            generation = prepared.run(DecodeOptions(length, new_tokens))
        return replace(generation, prefill_seconds=prefilled)


class CompiledOurs(Ours):
    """hybridspec with compiled passes; every length of a block is compiled before a prompt is timed."""

    options = {"compile": True}

    def __init__(self, target: Path, draft: Path) -> None:
        super().__init__(target, draft)
        #: Runners and lengths of blocks that have been through a pass.
        self.warm: set[tuple[object, int]] = set()

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        # The draft is fed two tokens after a block that was accepted as a whole.
        longest = [(self.target, k + 1)] + ([(self.draft.runner, 2)] if k else [])
        for runner, count in longest:
            for length in range(1, count + 1):
                if (runner, length) not in self.warm:
                    with runner.start(prompt) as session:
                        for _ in range(2):
                            session.verify(prompt[-1:] * length)
                            session.commit(1)
                    self.warm.add((runner, length))
        return super().decode(prompt, new_tokens, k)


class FirstToken:
    """A streamer of ``generate`` that notes when the first new token is there; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls, self.at = 0, now()

    def put(self, _: object) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = now()

    def end(self) -> None:
        return


class Generate(Decoder):
    """transformers' ``generate`` with its default cache."""

    options: dict[str, object] = {}

    def __init__(self, target: Path, draft: Path | None = None) -> None:
        self.model = TransformersModel(target)

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        import torch

        ids, first, begun = torch.tensor([prompt]), FirstToken(), now()
        output = self.model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            streamer=first,
            **self.options,
        )
        tokens = output[0, len(prompt) :].tolist()
        return timed(tokens, begun, first.at, untimed=1)


class StaticGenerate(Generate):
    """The same with a static cache; on a CPU ``generate`` compiles nothing by itself."""

    options = {"cache_implementation": "static"}


class CompiledGenerate(Generate):
    """``generate`` with a static cache and a compiled step, which it has to be talked into on a CPU.

    The cache is made once, as long as the longest prompt wants it: another length would be compiled anew.
    """

    length = 1024

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        from transformers import CompileConfig

        config = CompileConfig(fullgraph=False, mode="default", dynamic=False)
        config._compile_all_devices = True
        if not hasattr(self, "cache"):
            self.cache = self.model.static_cache(self.length)
        self.cache.reset()
        self.options = {"compile_config": config, self.model.cache_argument: self.cache}
        return super().decode(prompt, new_tokens, k)


class Loop(Decoder):
    """A hand-written greedy loop over transformers' forward pass with its default cache."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.model = TransformersModel(target)

    def cache(self) -> object:
        return self.model.dynamic_cache()

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        begun, cache = now(), self.cache()
        tokens = [self.model.greedy(prompt, cache, 0)]
        first = now()
        while len(tokens) < new_tokens and tokens[-1] not in self.model.stop_tokens:
            tokens.append(self.step(tokens[-1], cache, len(prompt) + len(tokens) - 1))
        return timed(tokens, begun, first, untimed=1)

    def step(self, token: int, cache: object, position: int) -> int:
        return self.model.greedy([token], cache, position)


class CompiledLoop(Loop):
    """The same with a static cache and ``torch.compile`` of the one-token step."""

    length = 1024

    def __init__(self, target: Path, draft: Path) -> None:
        import torch

        super().__init__(target, draft)
        self.kept = self.model.static_cache(self.length)
        self.compiled = torch.compile(self.model.model.forward, dynamic=False)

    def cache(self) -> object:
        self.model.reset(self.kept)
        return self.kept

    def step(self, token: int, cache: object, position: int) -> int:
        return self.model.greedy([token], cache, position, self.compiled)


#: Name -> class; those of the peers in files of their own, which import what only their environment has.
DECODERS = {
    "ours": "benchmarks.decoders:Ours",
    "ours, compiled": "benchmarks.decoders:CompiledOurs",
    "generate": "benchmarks.decoders:Generate",
    "generate, static cache": "benchmarks.decoders:StaticGenerate",
    "generate, static cache, compiled": "benchmarks.decoders:CompiledGenerate",
    "loop": "benchmarks.decoders:Loop",
    "loop, static cache, compiled": "benchmarks.decoders:CompiledLoop",
    "naive": "benchmarks.naive_decoder:Naive",
    "economize": "benchmarks.economize_decoder:Economize",
}


def decoder_class(name: str) -> type[Decoder]:
    module, _, attribute = DECODERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
