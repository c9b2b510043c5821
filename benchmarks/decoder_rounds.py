"""Rounds in which decoders, each in a process and an environment of its own, take turns on the same prompts."""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT
from hybridspec.decoding.step import Step
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.tuning.backends.base import Sample

HERE = "here"
PEERS = "peers"


@dataclass(frozen=True)
class Entry:
    """One way with its draft length. ``environment``: where it runs, this one or that of the peers."""

    way: str
    k: int = 0
    environment: str = HERE

    @property
    def ours(self) -> bool:
        """One of hybridspec's, in the environment that is measured."""
        return self.environment == HERE and self.way.split(",")[0] == "ours"

    @property
    def label(self) -> str:
        place = "" if self.environment == HERE else " (peers' environment)"
        return f"{self.way}{place}" + (f", K = {self.k}" if self.k else "")


class WorkerFailed(Exception):
    """What the worker said, or its last words."""


class Worker:
    """A process that decodes one way; see :mod:`benchmarks.decoder_process`. A context manager."""

    def __init__(self, python: str, way: str, target: Path, draft: Path, threads: int) -> None:
        self.way = way
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed on the way out
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.decoder_process", "--way", way]
            + ["--target", str(target), "--draft", str(draft), "--threads", str(threads)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()
        self._words.close()

    def versions(self) -> dict[str, str]:
        """Waits until it is ready.

        Raises:
            WorkerFailed: it cannot decode this way here.
        """
        return self._reply()["versions"]

    def decode(self, prompt: Sequence[int], new_tokens: int, k: int) -> TimedGeneration:
        """Raises :class:`WorkerFailed` if it could not."""
        request = {"prompt": list(prompt), "new_tokens": new_tokens, "k": k}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        reply = self._reply()
        return TimedGeneration(**{**reply, "steps": [Step(**step) for step in reply["steps"]]})

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with status {self._process.returncode}: {' '.join(lines[-2:])[:300]}"


@dataclass(frozen=True)
class RoundPrompt:
    """``id`` is unique among all workloads."""

    id: str
    workload: str
    tokens: tuple[int, ...]


@dataclass
class Outcome:
    """``runs[entry]``: one ``(prompt, generation)`` a round; the rounds of all entries are in the same order.

    ``failed``: what the entries said that do not run here. ``versions``: of each environment.
    """

    runs: dict[Entry, list[tuple[RoundPrompt, TimedGeneration]]]
    failed: dict[Entry, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    warm_up_seconds: dict[Entry, float] = field(default_factory=dict)
    interrupted: bool = False

    def samples(self, entry: Entry, reference: Entry) -> list[Sample]:
        """The entry's runs beside the reference's of the same prompt and round."""
        return [
            Sample.of(prompt.id, plain, run)
            for (prompt, run), (_, plain) in zip(self.runs[entry], self.runs[reference], strict=True)
            if run.timed_tokens and plain.timed_tokens
        ]


def run_rounds(
    entries: Sequence[Entry],
    prompts: Sequence[RoundPrompt],
    *,
    target: Path,
    draft: Path,
    pythons: dict[str, str],
    repeats: int,
    new_tokens: int,
    threads: int,
    seed: int,
    say: Callable[[str], None],
) -> Outcome:
    """Every entry decodes every prompt ``repeats`` times; within a round the order is drawn anew for each prompt.

    An entry that fails leaves the rounds with its reason. Ctrl-C ends them with the prompts that are done.

    Args:
        pythons: interpreter of each environment that the entries name.
    """
    outcome = Outcome({entry: [] for entry in entries})
    order = random.Random(seed)

    def leave(left: Sequence[Entry], error: WorkerFailed) -> None:
        for entry in left:
            outcome.failed[entry] = str(error)
            outcome.runs.pop(entry, None)
            say(f"{entry.label}: left out. {error}")

    with ExitStack() as stack:
        workers = {
            key: stack.enter_context(Worker(pythons[key[0]], key[1], target, draft, threads))
            for key in dict.fromkeys((entry.environment, entry.way) for entry in entries)
        }
        try:
            for (environment, way), worker in workers.items():
                try:
                    found = worker.versions()
                    outcome.versions[environment] = outcome.versions.get(environment, {}) | found
                except WorkerFailed as error:
                    leave([e for e in entries if (e.environment, e.way) == (environment, way)], error)
            for entry in list(outcome.runs):
                begun = time.perf_counter()
                try:
                    workers[entry.environment, entry.way].decode(prompts[0].tokens, min(8, new_tokens), entry.k)
                except WorkerFailed as error:
                    leave([entry], error)
                    continue
                outcome.warm_up_seconds[entry] = time.perf_counter() - begun
                say(f"warmed up in {outcome.warm_up_seconds[entry]:.1f} s: {entry.label}")
            rounds = [(repeat, prompt) for repeat in range(repeats) for prompt in prompts]
            for number, (_, prompt) in enumerate(rounds):
                say(f"round {number + 1} of {len(rounds)}: {prompt.id}")
                turn = list(outcome.runs)
                order.shuffle(turn)
                found = {}
                for entry in turn:
                    worker = workers[entry.environment, entry.way]
                    try:
                        found[entry] = worker.decode(prompt.tokens, new_tokens, entry.k)
                    except WorkerFailed as error:
                        leave([entry], error)
                for entry, run in found.items():
                    outcome.runs[entry].append((prompt, run))
        except KeyboardInterrupt:
            outcome.interrupted = True
            say("interrupted; what follows is about the rounds that are done")
    return outcome


def pythons(peers: Path | None) -> dict[str, str]:
    """Interpreters by environment: this one, and the peers' if there is one."""
    return {HERE: sys.executable} | ({} if peers is None else {PEERS: str(peers)})
