"""Times one offline vLLM engine: ``python -m hybridspec_timing_engine JOB.json``, which writes its answer to a file.

The job: ``model``, ``arguments`` and ``overrides`` (see :mod:`hybridspec_audit_engine`), ``answer`` (the file),
``progress`` (a file that says what is running), and ``loads``. Each load has ``name``, ``prompts`` (token ids),
``rounds`` (indices of the prompts that are sent at one time), ``max_new_tokens``, ``temperature``, ``top_k``,
``top_p``, ``seed``.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hybridspec_audit_engine import engine_options

#: Tokens of the untimed first round of a load, in which kernels are chosen and compiled.
WARM_UP = 8
PREFIX = "vllm:spec_decode_num_"


def counters(llm: Any) -> dict[str, list[int]]:
    """vLLM's counters of speculation since the process began; empty without speculation."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            values = getattr(metric, "values", None)
            values = [metric.value] if values is None else values
            name = metric.name.removeprefix(PREFIX)
            # One entry for each engine of a data-parallel group.
            so_far = found.get(name, [0] * len(values))
            found[name] = [int(a + b) for a, b in zip(so_far, values, strict=True)]
    return found


def difference(after: dict[str, list[int]], before: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: [a - b for a, b in zip(values, before[name], strict=True)] for name, values in after.items()}


class Timing:
    """Drives an engine step by step, as fast as it goes."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.sent = 0

    def round(self, load: dict[str, Any], indices: list[int], max_tokens: int) -> dict[str, Any]:
        """Sends the prompts of a round together, and waits for all of them.

        ``seconds``, ``rows`` and ``tokens`` count from when the last of them had its first token: decoding without
        prefill. A row is one sequence in one step. ``all_rows`` and ``all_tokens`` count everything behind the first
        tokens, as the counters do.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        before = counters(self.llm)
        lengths: dict[str, int] = {}
        events: list[tuple[float, int, int]] = []
        for index in indices:
            sampled = load["temperature"] > 0
            params = SamplingParams(
                temperature=load["temperature"],
                top_k=load["top_k"] or 0,
                top_p=load["top_p"] or 1.0,
                seed=load["seed"] + index if sampled else None,
                max_tokens=max_tokens,
                output_kind=RequestOutputKind.CUMULATIVE,
                detokenize=False,
            )
            self.sent += 1
            self.engine.add_request(f"timing-{self.sent}", self._rendered(load["prompts"][index]), params)
        begun, last_first = time.perf_counter(), None
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            rows = tokens = 0
            for output in outputs:
                length = len(output.outputs[0].token_ids)
                known = lengths.get(output.request_id, 0)
                if not known and length:
                    last_first = now
                    # Everything that comes with the first token belongs to it.
                elif length > known:
                    rows, tokens = rows + 1, tokens + length - known
                lengths[output.request_id] = length
            events.append((now, rows, tokens))
        late = [event for event in events if last_first is not None and event[0] > last_first]
        return {
            "seconds": late[-1][0] - last_first if late else 0.0,
            "rows": sum(event[1] for event in late),
            "tokens": sum(event[2] for event in late),
            "all_rows": sum(event[1] for event in events),
            "all_tokens": sum(event[2] for event in events),
            "whole_seconds": events[-1][0] - begun,
            "counters": difference(counters(self.llm), before),
        }

    def _rendered(self, tokens: list[int]) -> Any:
        prompt = {"prompt_token_ids": tokens}
        renderer = getattr(self.llm, "renderer", None)
        if not hasattr(renderer, "render_cmpl"):
            return prompt
        return renderer.render_cmpl([prompt])[0]


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    progress = Path(job["progress"])
    progress.write_text("the engine starts")
    options = engine_options(job["arguments"], job["overrides"])
    options |= {"model": job["model"], "disable_log_stats": False}
    llm = LLM.from_engine_args(EngineArgs(**options))
    timing = Timing(llm)
    loads = {}
    for load in job["loads"]:
        progress.write_text(f"{load['name']}, first steps")
        timing.round(load, load["rounds"][0], min(WARM_UP, load["max_new_tokens"]))
        loads[load["name"]] = []
        for number, indices in enumerate(load["rounds"], 1):
            progress.write_text(f"{load['name']}, round {number} of {len(load['rounds'])}")
            loads[load["name"]].append(timing.round(load, indices, load["max_new_tokens"]))
    config = llm.llm_engine.vllm_config
    return {
        "version": vllm.__version__,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "method": getattr(config.speculative_config, "method", None),
        "loads": loads,
        "counters": counters(llm),
    }


def end_with_parent(seconds: float = 1.0) -> None:
    """Ends this process group, of which this process is the first, when whoever started it is gone without a word."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    answer = Path(job["answer"])
    whole = json.dumps(run(job))
    partial = answer.with_name(answer.name + ".partial")
    partial.write_text(whole)
    partial.replace(answer)


if __name__ == "__main__":
    main()
