"""Plain transformers, our plain decoding and speculative decoding of the embedded pair, in one interleaved run.

    python benchmarks/embedded_pair.py

Every prompt runs each way in turn before the next prompt, prefill taken off; ratios are to our plain decoding of the
same prompt, pooled per workload, with bootstrap intervals over prompts and repeats. Run it on a quiet machine; it
prints the load average.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hybridspec import embedded
from hybridspec.decoder import Statistics
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runner import TargetRunner
from hybridspec.sampling import Sampling
from hybridspec.tuning.cost_model import ideal_speedup, measure_costs
from hybridspec.tuning.encoding import encode_prompt
from hybridspec.tuning.trial import PreparedPrompt
from hybridspec.tuning.workloads import choose_prompts, find_workload

GENERATE = "generate"


@dataclass
class Sample:
    """One way of decoding one prompt once."""

    way: str
    seconds_per_token: float
    cpu_seconds_per_token: float


def transformers_generate(runner: TargetRunner, tokens: list[int], new: int) -> tuple[Sample, list[int]]:
    """Greedy ``generate`` of transformers with its own cache; time per token between one new token and ``new``."""
    ids = torch.tensor([tokens])
    times = []
    for count in (1, new):
        wall, cpu = time.perf_counter(), time.process_time()
        output = runner.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=True
        )
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    generated = output[0, len(tokens) :].tolist()
    (wall_1, cpu_1), (wall_n, cpu_n) = times
    steps = max(1, len(generated) - 1)
    return Sample(GENERATE, (wall_n - wall_1) / steps, (cpu_n - cpu_1) / steps), generated


def bootstrap(ratios_over: np.ndarray, ratios_under: np.ndarray) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(ratios_over), (2000, len(ratios_over)))
    samples = ratios_over[chosen].sum(1) / ratios_under[chosen].sum(1)
    low, high = np.quantile(samples, [0.05, 0.95])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="embedded workload or file; default: all embedded ones")
    parser.add_argument("--draft", default=embedded.DEFAULT_DRAFT, choices=list(embedded.DRAFTS))
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"torch {torch.__version__}, {arguments.threads} threads, load average {os.getloadavg()[0]:.1f} at the start"
    )

    runner = TargetRunner.from_pretrained(embedded.TARGET)
    draft = SameArchitectureDraft(TargetRunner.from_pretrained(embedded.DRAFTS[arguments.draft]))
    results = {}
    for name in arguments.workload or embedded.workload_files():
        results[name] = measure(runner, draft, name, arguments)
        console.print(workload_table(name, results[name]))
    console.print(f"load average {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(runner: TargetRunner, draft: SameArchitectureDraft, name: str, arguments: argparse.Namespace) -> dict:
    samples: dict[str, list[Sample]] = {}
    steps: dict[int, Statistics] = {k: Statistics() for k in arguments.k}
    mismatches = costs = None
    for number, prompt in enumerate(choose_prompts(find_workload(name).prompts, arguments.prompts)):
        tokens = encode_prompt(runner, prompt)
        with PreparedPrompt(runner, draft, prompt.id, tokens, Sampling(), 0) as prepared:
            costs = costs or measure_costs(prepared, max(arguments.k), repeats=7)
            for repeat in range(arguments.repeats):
                ways = [GENERATE, 0, *arguments.k]
                if (number + repeat) % 2:
                    ways.reverse()
                outputs = {}
                for way in ways:
                    if way == GENERATE:
                        sample, outputs[way] = transformers_generate(runner, tokens, arguments.new_tokens)
                    else:
                        run = prepared.run(way, arguments.new_tokens)
                        outputs[way] = run.tokens
                        count = len(run.tokens)
                        sample = Sample(f"K = {way}", run.wall_seconds / count, run.cpu_seconds / count)
                        if way:
                            steps[way].steps += run.steps
                    samples.setdefault(sample.way, []).append(sample)
                mismatches = (mismatches or 0) + sum(o != outputs[0] for o in outputs.values())
    plain = {
        c: np.array([getattr(s, c) for s in samples["K = 0"]]) for c in ("seconds_per_token", "cpu_seconds_per_token")
    }
    ways = {}
    for way, rows in samples.items():
        wall, cpu = (np.array([getattr(s, c) for s in rows]) for c in plain)
        k = int(way.removeprefix("K = ")) if way != GENERATE else None
        tau = steps[k].acceptance_length if k else None
        ideal = ideal_speedup(tau, costs, k) if k else None
        speedup = float(plain["seconds_per_token"].sum() / wall.sum())
        ways[way] = {
            "median_milliseconds_per_token": float(np.median(wall) * 1e3),
            "speedup": speedup,
            "interval_90": bootstrap(plain["seconds_per_token"], wall),
            "cpu_speedup": float(plain["cpu_seconds_per_token"].sum() / cpu.sum()),
            "acceptance_rate": steps[k].acceptance_rate if k else None,
            "acceptance_length": tau,
            "ideal_speedup": ideal,
            "efficiency": speedup / ideal if ideal else None,
        }
    return {
        "ways": ways,
        "outputs_that_differ": mismatches,
        "c": costs.draft_ratio,
        "v": {k: costs.verify_ratio(k) for k in arguments.k},
        "rollback_ratio": costs.rollback / costs.target_step,
        "costs": asdict(costs),
    }


def workload_table(name: str, result: dict) -> Table:
    v = ", ".join(f"v({k}) {ratio:.2f}" for k, ratio in result["v"].items())
    table = Table(
        title=f"{name}: c {result['c']:.3f}, rollback {result['rollback_ratio']:.3f}, {v}; "
        f"outputs that differ from plain: {result['outputs_that_differ']}",
        title_justify="left",
    )
    headings = ("", "ms/token", "speed-up (90 %)", "CPU speed-up", "acceptance", "tau", "ideal", "efficiency")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for way, row in sorted(result["ways"].items(), key=lambda item: (item[0] != GENERATE, item[0])):
        cell = lambda key, pattern: "-" if row[key] is None else pattern.format(row[key])  # noqa: B023, E731
        table.add_row(
            way,
            f"{row['median_milliseconds_per_token']:.1f}",
            "{:.2f} ({:.2f} to {:.2f})".format(row["speedup"], *row["interval_90"]),
            f"{row['cpu_speedup']:.2f}",
            cell("acceptance_rate", "{:.0%}"),
            cell("acceptance_length", "{:.2f}"),
            cell("ideal_speedup", "{:.2f}"),
            cell("efficiency", "{:.0%}"),
        )
    return table


if __name__ == "__main__":
    main()
