"""Ways of decoding a prompt, each on its own: what a worker runs.

They differ in what they can separate. Ours and the hand-written loops know when their prefill ends. transformers'
``generate`` tells when its first token is there, so it is timed from then on, for one token less. economize prefills
its draft only after the first target pass, so it is timed from the end of its second pass on.
"""

import importlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.transformers_model import Model


def now() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


@dataclass
class Decoded:
    """``seconds`` (wall) and ``cpu_seconds`` are those of ``counted`` of the tokens, prefill left out; ``prefill``
    seconds are those before. ``steps``: (drafted, accepted).
    """

    tokens: list[int]
    prefill_seconds: float
    seconds: float
    cpu_seconds: float
    counted: int
    steps: list[tuple[int, int]] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


def decoded(
    tokens: list[int], begun: tuple[float, float], timed_from: tuple[float, float], counted: int, **more: object
) -> Decoded:
    """Of a run that ends now."""
    wall, cpu = now()
    return Decoded(tokens, timed_from[0] - begun[0], wall - timed_from[0], cpu - timed_from[1], counted, **more)


class Way(ABC):
    """Loaded once with the folders of the pair, then decodes greedily as often as it is asked to."""

    @abstractmethod
    def __init__(self, target: Path, draft: Path) -> None: ...

    @abstractmethod
    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded: ...


class Ours(Way):
    """hybridspec; K = 0 is its plain decoding."""

    options: dict[str, object] = {}

    def __init__(self, target: Path, draft: Path) -> None:
        from hybridspec.drafts.same_architecture import SameArchitectureDraft
        from hybridspec.runtime.runner import TargetRunner

        self.target = TargetRunner.from_pretrained(target, **self.options)
        self.draft = SameArchitectureDraft(TargetRunner.from_pretrained(draft, **self.options))

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded:
        from hybridspec.decoding.sampling import Sampling
        from hybridspec.tuning.timed_decoding import PreparedPrompt

        begun = now()
        with PreparedPrompt(self.target, self.draft if k else None, "", prompt, Sampling(), 0) as prepared:
            prefilled = time.perf_counter() - begun[0]
            run = prepared.run(k, new_tokens)
        return Decoded(
            run.tokens,
            prefilled,
            run.wall_seconds,
            run.cpu_seconds,
            len(run.tokens),
            [(step.drafted, step.accepted) for step in run.steps],
            sum(step.draft_seconds for step in run.steps),
            sum(step.verify_seconds for step in run.steps),
        )


class CompiledOurs(Ours):
    """hybridspec with compiled passes; every length of a block is compiled before a prompt is timed."""

    options = {"compile": True}

    def __init__(self, target: Path, draft: Path) -> None:
        super().__init__(target, draft)
        #: Runners and lengths of blocks that have been through a pass.
        self.warm: set[tuple[object, int]] = set()

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded:
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


class Generate(Way):
    """transformers' ``generate`` with its default cache."""

    options: dict[str, object] = {}

    def __init__(self, target: Path, draft: Path | None = None) -> None:
        self.model = Model(target)

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded:
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
        return decoded(tokens, begun, first.at, len(tokens) - 1)


class StaticGenerate(Generate):
    """The same with a static cache; on a CPU ``generate`` compiles nothing by itself."""

    options = {"cache_implementation": "static"}


class CompiledGenerate(Generate):
    """``generate`` with a static cache and a compiled step, which it has to be talked into on a CPU.

    The cache is made once, as long as the longest prompt wants it: another length would be compiled anew.
    """

    length = 1024

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded:
        from transformers import CompileConfig

        config = CompileConfig(fullgraph=False, mode="default", dynamic=False)
        config._compile_all_devices = True
        if not hasattr(self, "cache"):
            self.cache = self.model.static_cache(self.length)
        self.cache.reset()
        self.options = {"compile_config": config, self.model.cache_argument: self.cache}
        return super().decode(prompt, new_tokens, k)


class Loop(Way):
    """A hand-written greedy loop over transformers' forward pass with its default cache."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.model = Model(target)

    def cache(self) -> object:
        return self.model.dynamic_cache()

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> Decoded:
        begun, cache = now(), self.cache()
        tokens = [self.model.greedy(prompt, cache, 0)]
        first = now()
        while len(tokens) < new_tokens and tokens[-1] not in self.model.stop_tokens:
            tokens.append(self.step(tokens[-1], cache, len(prompt) + len(tokens) - 1))
        return decoded(tokens, begun, first, len(tokens) - 1)

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
WAYS = {
    "ours": "benchmarks.ways:Ours",
    "ours, compiled": "benchmarks.ways:CompiledOurs",
    "generate": "benchmarks.ways:Generate",
    "generate, static cache": "benchmarks.ways:StaticGenerate",
    "generate, static cache, compiled": "benchmarks.ways:CompiledGenerate",
    "loop": "benchmarks.ways:Loop",
    "loop, static cache, compiled": "benchmarks.ways:CompiledLoop",
    "naive": "benchmarks.naive:Naive",
    "economize": "benchmarks.economize_way:Economize",
}


def way_class(name: str) -> type[Way]:
    module, _, attribute = WAYS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
