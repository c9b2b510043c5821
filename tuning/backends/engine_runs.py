"""Runs of an offline vLLM engine, one for each configuration, that time all loads at once and are kept on disk.

An engine is started for a minute or more and serves for seconds: one that runs is timed with every workload at every
concurrency, and the answer is kept in the study's folder, so that no engine is started twice, not even in a later
sitting.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridspec.engines.audit.engine import Engine, EngineFailedError
from hybridspec.engines.export.vllm import Export
from hybridspec.errors import InputError
from hybridspec.tuning.backends.base import Progress
from hybridspec.tuning.backends.request_loads import Load, Round
from hybridspec.tuning.configuration import Configuration

#: Seconds between two looks at what an engine is doing.
LOOK = 0.5
TIMING = "hybridspec_timing_engine"


@dataclass
class EngineRuns:
    """``export`` gives the settings of a configuration; ``identity`` tells models, version and machine apart."""

    engine: Engine
    export: Callable[[Configuration], Export]
    loads: Sequence[Load]
    identity: object
    _answers: dict[Configuration, dict[str, Any]] = field(default_factory=dict)

    def rounds(self, configuration: Configuration, load: Load, progress: Progress) -> list[Round]:
        """How the configuration did on one load.

        Raises:
            EngineFailedError: the engine did not start or died.
        """
        if configuration not in self._answers:
            self._answers[configuration] = self._answer(configuration, progress)
        return [read_round(r) for r in self._answers[configuration]["loads"][load.name]]

    def _answer(self, configuration: Configuration, progress: Progress) -> dict[str, Any]:
        export = self.export(configuration)
        job = {"overrides": overrides(export), "loads": [describe_load(load) for load in self.loads]}
        text = json.dumps([self.identity, job, export.environment], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = re.sub(r"\W+", "-", f"{configuration.label[-60:]} {digest}").strip("-")
        kept = self.engine.folder / f"{name}.answer.json"
        if kept.exists():
            return json.loads(kept.read_text())
        self.engine.folder.mkdir(parents=True, exist_ok=True)
        note = self.engine.folder / f"{name}.progress"
        engine = replace(self.engine, environment={**self.engine.environment, **export.environment}, module=TIMING)
        try:
            with watched(note, lambda text: progress(f"{configuration.label}: {text}", 0.0)):
                answer = engine.run(name, progress=str(note), **job)
        except EngineFailedError as error:
            raise EngineFailedError(f"vLLM with {configuration.label}: {error}") from error
        finally:
            note.unlink(missing_ok=True)
        asked = (export.speculative_config or {}).get("method")
        if answer["method"] != asked:
            kept.unlink()
            raise InputError(f"{configuration.label}: vLLM made method {answer['method']!r} of {asked!r}")
        return answer


def overrides(export: Export) -> dict[str, Any]:
    """Keyword arguments of the engine, without the model."""
    return {name: value for name, value in export.arguments.items() if name != "model"}


def describe_load(load: Load) -> dict[str, Any]:
    s = load.settings
    return {
        "name": load.name,
        "prompts": [list(tokens) for tokens in load.prompts],
        "rounds": load.rounds,
        "max_new_tokens": s.max_new_tokens,
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "seed": s.seed,
    }


def read_round(row: Mapping[str, Any]) -> Round:
    counters = row["counters"]
    drafts, drafted = (sum(counters.get(name, ())) for name in ("drafts", "draft_tokens"))
    accepted = tuple(counters.get("accepted_tokens_per_pos", ()))
    return Round(row["seconds"], row["rows"], row["tokens"], row["all_rows"], drafts, drafted, accepted)


@contextmanager
def watched(note: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Tells what is written into ``note`` while the block runs."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(LOOK):
            if note.exists():
                tell(note.read_text())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
