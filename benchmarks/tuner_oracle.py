"""The tuner against an exhaustive grid: how much speed-up its answers lose, and how much measuring they save.

The grid measures every configuration of the tuner's space on all the prompts that the tuner might use, every one in
each interleaved round; the best of it is the oracle. Regret: the oracle's speed-up over the grid's speed-up of the
tuner's answer, minus 1. The grid's own best is partly luck, so its winner is chosen on half of the rounds and judged,
like the tuner's answer, on the other half. Time is wall time, prefill included on both sides. The tuner runs first, in
a storage of its own.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.tables import Grid, number
from hybridspec import embedded
from hybridspec.tuning.backend import Sample
from hybridspec.tuning.configuration import Configuration
from hybridspec.tuning.decision import ratio, samples_table
from hybridspec.tuning.run import EMBEDDED_DRAFTS, LENGTHS, TuneRequest, Tuning
from hybridspec.tuning.study import Settings, WorkloadStudy
from hybridspec.tuning.torch_backend import TorchBackend, sample_of
from hybridspec.tuning.trial import Contender, PreparedPrompt, measure_round


def grid(study: WorkloadStudy, rounds: int, seed: int) -> list[dict[Configuration, list[Sample]]]:
    """Every configuration of the study's space on its prompts; one dictionary of samples for each round."""
    backend: TorchBackend = study.backend
    bench, order = backend.bench, random.Random(seed)
    configurations = [c for c in study.space if not c.plain]
    rules = [bench.length(c) for c in configurations]
    found = []
    with ExitStack() as stack:
        opened = {
            (spec, i): stack.enter_context(
                PreparedPrompt(bench.target, draft, p.id, p.tokens, backend.sampling, backend.seed + i)
            )
            for i, p in enumerate(backend.prompts)
            for spec, draft in [("", None), *((c.draft, bench.draft(c.draft)) for c in configurations)]
        }
        for c, rule in zip(configurations, rules, strict=True):
            # As the tuner does: a rule that learns has seen the texts before it is measured.
            for i in range(len(backend.prompts) if rule.learns else 0):
                opened[c.draft, i].run(rule, backend.max_new_tokens, bench.segments(c), c.verification)
        for _ in range(rounds):
            samples: dict[Configuration, list[Sample]] = {c: [] for c in configurations}
            for i in range(len(backend.prompts)):
                contenders = [
                    Contender(opened[c.draft, i], rule, bench.segments(c), c.verification)
                    for c, rule in zip(configurations, rules, strict=True)
                ]
                pairs = measure_round(opened["", i], contenders, backend.max_new_tokens, order)
                for c, pair in zip(configurations, pairs, strict=True):
                    samples[c].append(sample_of(pair))
            found.append(samples)
    return found


def pooled(
    rounds: Sequence[dict[Configuration, list[Sample]]], prompts: Collection[str] | None = None
) -> dict[Configuration, float]:
    """Speed-ups over all rounds, of these prompts or all."""
    kept = {c: [s for r in rounds for s in r[c] if prompts is None or s.prompt in prompts] for c in rounds[0]}
    return {c: float(ratio(samples_table(samples))) for c, samples in kept.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("tuner-oracle", __doc__, "--workload json --draft prompt-lookup --length fixed --max-k 4")
    parser.add_argument("--workload", action="append", help="embedded workload or file; default: all embedded ones")
    parser.add_argument("--draft", action="append", help=f"default: {', '.join(EMBEDDED_DRAFTS)}")
    parser.add_argument(
        "--length", action="append", help=f"beside every fixed K; fixed: no other; default: {', '.join(LENGTHS)}"
    )
    parser.add_argument("--max-k", type=command.at_least(1), default=8)
    parser.add_argument("--prompts", type=command.at_least(1), default=3)
    parser.add_argument("--new-tokens", type=command.at_least(2), default=48)
    parser.add_argument(
        "--rounds",
        type=command.at_least(2),
        default=2,
        help="rounds of the grid: its winner is chosen on one half of them and judged on the other",
    )
    parser.add_argument("--seconds", type=float, default=Settings.seconds, help="the tuner's time limit per workload")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.workload, chosen.draft, chosen.length = ["json"], ["prompt-lookup"], ["fixed"]
        chosen.max_k, chosen.prompts, chosen.new_tokens = 1, 1, 8
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as record:
        settings = Settings(
            longest=chosen.max_k,
            prompts=chosen.prompts,
            max_new_tokens=chosen.new_tokens,
            seconds=chosen.seconds,
        )
        rows = record["workloads"] = []
        with tempfile.TemporaryDirectory() as folder:
            request = TuneRequest(
                drafts=tuple(chosen.draft or EMBEDDED_DRAFTS),
                lengths=tuple(rule for rule in chosen.length or LENGTHS if rule != "fixed"),
                workloads=tuple(chosen.workload or embedded.workload_files()),
                out=Path(folder),
                settings=settings,
            )
            for study in Tuning(request).studies:
                begun = time.perf_counter()
                result = study.run()
                tuned_seconds = time.perf_counter() - begun
                begun = time.perf_counter()
                rounds = grid(study, chosen.rounds, seed=chosen.seed + 1)
                grid_seconds = (time.perf_counter() - begun) / chosen.rounds
                half = len(rounds) // 2
                # The survey has seen no others.
                surveyed = {study.backend.prompts[i].id for i in study.backend.first}
                chosen_on, judged_on = pooled(rounds[:half]), pooled(rounds[half:])
                oracle = max(chosen_on, key=chosen_on.get)
                answer = result.answer.configuration
                values = {**judged_on, **{c: 1.0 for c in study.space if c.plain}}
                best = values[oracle] if chosen_on[oracle] > 1.0 else 1.0
                rows.append(
                    {
                        "workload": study.name,
                        "answer": answer.label,
                        "oracle": oracle.label if chosen_on[oracle] > 1.0 else "plain decoding",
                        "speedup_of_answer": values[answer],
                        "speedup_of_oracle": best,
                        "regret": best / values[answer] - 1,
                        "tuner_seconds": tuned_seconds,
                        "grid_seconds": grid_seconds,
                        "time_share": tuned_seconds / grid_seconds,
                        "trials": len(result.samples) + len(result.pruned),
                        "configurations": len(study.space) - 1,
                        "stopped": result.stopped,
                        "prediction_errors": {c.label: e for c, e in result.prediction_errors.items()},
                        "errors_against_grid": {
                            c.label: result.survey.predicted[c] / v - 1
                            for c, v in pooled(rounds, surveyed).items()
                            if c in result.survey.predicted
                        },
                    }
                )
                command.show(console, [grid_of(rows[-1:])])
    command.show(console, tables(record))
    return 0


def tables(result: dict) -> list[Grid]:
    rows = result["workloads"]
    shown = grid_of(rows)
    errors = [abs(e) for row in rows for e in row["errors_against_grid"].values()]
    shown.notes = [
        f"Median regret {statistics.median(r['regret'] for r in rows):.1%}; measuring time "
        f"{sum(r['tuner_seconds'] for r in rows) / sum(r['grid_seconds'] for r in rows):.0%} of one round of the grid; "
        f"cost model's median absolute error against the grid {statistics.median(errors):.1%}."
    ]
    return [shown]


def grid_of(rows: Sequence[dict]) -> Grid:
    shown = Grid(
        "The tuner against an exhaustive grid",
        (
            "workload",
            "tuner's answer",
            "grid's best",
            "its speed-up",
            "best speed-up",
            "regret",
            "trials",
            "time",
        ),
    )
    for row in rows:
        shown.rows.append(
            [
                row["workload"],
                row["answer"],
                row["oracle"],
                number(row["speedup_of_answer"]),
                number(row["speedup_of_oracle"]),
                f"{row['regret']:.1%}",
                f"{row['trials']} of {row['configurations']}",
                f"{row['time_share']:.0%}",
            ]
        )
    return shown
