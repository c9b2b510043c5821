"""Plain transformers, our plain decoding and speculative decoding of the embedded pair, in one interleaved run.

    python benchmarks/embedded_pair.py

Every prompt runs each way in turn before the next prompt, prefill taken off; ratios are to our plain decoding of the
same prompt, pooled per workload, with bootstrap intervals over prompts and repeats. Run it on a quiet machine; it
prints the load average.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hybridspec import embedded
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runner import TargetRunner
from hybridspec.sampling import Sampling
from hybridspec.tuning.backend import Sample
from hybridspec.tuning.cost_model import measure_verify
from hybridspec.tuning.encoding import encode_prompt
from hybridspec.tuning.measurement import measurement_of
from hybridspec.tuning.torch_backend import sample_of
from hybridspec.tuning.trial import Pair, PreparedPrompt, Run
from hybridspec.tuning.workloads import choose_prompts, find_workload

GENERATE = "generate"


def transformers_generate(runner: TargetRunner, tokens: list[int], new: int) -> tuple[float, float, list[int]]:
    """Greedy ``generate`` of transformers with its own cache: wall and CPU seconds of its new tokens, prefill taken
    off, and the tokens.
    """
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
    # Its first token comes with the prefill, which is taken off.
    scale = len(generated) / max(1, len(generated) - 1)
    return (wall_n - wall_1) * scale, (cpu_n - cpu_1) * scale, generated


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
    mismatches = 0
    verify: list[float] = []
    plain_step = 0.0
    for number, prompt in enumerate(choose_prompts(find_workload(name).prompts, arguments.prompts)):
        tokens = encode_prompt(runner, prompt)
        with PreparedPrompt(runner, draft, prompt.id, tokens, Sampling(), 0) as prepared:
            if not verify:
                plain_step, verify = measure_verify(prepared, max(arguments.k), repeats=7)
            for repeat in range(arguments.repeats):
                ways = [GENERATE, 0, *arguments.k]
                if (number + repeat) % 2:
                    ways.reverse()
                runs: dict[object, Run] = {}
                for way in ways:
                    if way == GENERATE:
                        wall, cpu, generated = transformers_generate(runner, tokens, arguments.new_tokens)
                        runs[way] = Run(generated, [], wall, cpu)
                    else:
                        runs[way] = prepared.run(way, arguments.new_tokens)
                mismatches += sum(run.tokens != runs[0].tokens for run in runs.values())
                for way, run in runs.items():
                    label = way if way == GENERATE else f"K = {way}"
                    samples.setdefault(label, []).append(sample_of(Pair(prompt.id, runs[0], run)))
    ways = {}
    for way, rows in samples.items():
        m = measurement_of(rows)
        speculative = bool(m.acceptance_rate)
        ways[way] = {
            "median_milliseconds_per_token": statistics.median(s.seconds / s.tokens for s in rows) * 1e3,
            "speedup": m.speedup,
            "interval_90": m.interval,
            "cpu_speedup": m.cpu_speedup,
            "acceptance_rate": m.acceptance_rate,
            "acceptance_length": m.acceptance_length if speculative else None,
            "draft_cost": m.draft_cost,
            "ideal_speedup": m.ideal_speedup if speculative else None,
            "efficiency": m.efficiency if speculative else None,
        }
    return {
        "ways": ways,
        "outputs_that_differ": mismatches,
        "v": {k: verify[k] / plain_step for k in arguments.k},
        "plain_step_seconds": plain_step,
    }


def workload_table(name: str, result: dict) -> Table:
    v = ", ".join(f"v({k}) {ratio:.2f}" for k, ratio in result["v"].items())
    table = Table(
        title=f"{name}: {v}; outputs that differ from plain: {result['outputs_that_differ']}", title_justify="left"
    )
    headings = ("", "ms/token", "speed-up (90 %)", "CPU speed-up", "acceptance", "tau", "c", "ideal", "efficiency")
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
            cell("draft_cost", "{:.3f}"),
            cell("ideal_speedup", "{:.2f}"),
            cell("efficiency", "{:.0%}"),
        )
    return table


if __name__ == "__main__":
    main()
