"""Starts a vLLM engine in a child process of a given Python and reads its answer."""

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridspec.errors import HybridspecError, InputError

CHILD = Path(__file__).resolve().parent / "child"
#: A line that begins with the name of an exception, the way Python ends a traceback.
EXCEPTION = re.compile(r"^(?:.*\s)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.*)")


class EngineFailedError(HybridspecError):
    """The engine did not come to an answer; the message is its own."""


@dataclass(frozen=True)
class Engine:
    """Where and how engines run.

    Args:
        python: interpreter that has vLLM.
        target: checkpoint folder, or whatever vLLM takes for a model.
        arguments: options as of ``vllm serve``.
        folder: for jobs, answers and logs.
        seconds: an engine that takes longer has failed.
        module: what runs in the child, of those in ``child``.
    """

    python: str
    target: str
    arguments: list[str]
    folder: Path
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "hybridspec_audit_engine"

    def run(self, name: str, **job: Any) -> dict[str, Any]:
        """The answer of :mod:`hybridspec_audit_engine` to a job.

        Raises:
            EngineFailedError: the engine did not start or died; the message is its last error.
        """
        stem = self.folder / re.sub(r"\W+", "-", name)
        answer, log = stem.with_suffix(".answer.json"), stem.with_suffix(".log")
        answer.unlink(missing_ok=True)
        whole = {"model": self.target, "arguments": self.arguments, "answer": str(answer), **job}
        stem.with_suffix(".job.json").write_text(json.dumps(whole))
        command = [self.python, "-m", self.module, str(stem.with_suffix(".job.json"))]
        with log.open("w") as output:
            try:
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=self._variables(), start_new_session=True
                )
            except OSError as error:
                raise InputError(f"--python {self.python}: cannot be started: {error}") from error
            try:
                process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                raise EngineFailedError(f"no answer within {self.seconds:g} s (log: {log})") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if not answer.exists():
            raise EngineFailedError(f"{last_error(log.read_text(errors='replace'))} (log: {log})")
        return json.loads(answer.read_text())

    def _variables(self) -> dict[str, str]:
        defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        # One process less to start, where the engine needs no other.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        path = os.pathsep.join(filter(None, [str(CHILD), os.environ.get("PYTHONPATH")]))
        return {**defaults, **os.environ, **self.environment, "PYTHONPATH": path}


def last_error(log: str) -> str:
    """What to tell of a log: the last exception that is not merely about a dead engine, or the last line."""
    found = [match for line in log.splitlines() if (match := EXCEPTION.match(line))]
    telling = [m for m in found if "Engine core" not in m[2] and "EngineDeadError" not in m[1]] or found
    if telling:
        return f"{telling[-1][1].rpartition('.')[2]}: {telling[-1][2]}"
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
