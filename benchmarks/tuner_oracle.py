"""The tuner against an exhaustive grid: how much speed-up its answers lose, and how much measuring they save.

The grid measures every configuration of the tuner's space on the same prompts, each in turn with plain decoding, as a
trial of the tuner does; the best of it is the oracle. The grid's best is partly luck, so a rematch decides: oracle and
answer decode the prompts in turn, several times. Regret: time per token of the answer over that of the oracle there,
minus 1, with a 90 % interval by bootstrap over prompts; 0 if they are the same. Time is wall time, prefill included on
both sides. The tuner runs first, in a storage of its own.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks import command
from benchmarks.tables import Grid, number
from hybridspec import embedded
from hybridspec.drafts.length import FixedLength
from hybridspec.tuning.backend import Sample
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.decision import bootstrap, ratio, samples_table
from hybridspec.tuning.run import EMBEDDED_DRAFTS, LENGTHS, TuneRequest, Tuning
from hybridspec.tuning.study import Settings, WorkloadStudy
from hybridspec.tuning.torch_backend import TorchBackend, sample_of
from hybridspec.tuning.trial import Contender, PreparedPrompt, in_turn, measure_pair


class Field:
    """Every prompt of a study, open for every draft, and every configuration with its rule.

    A rule that learns has seen the texts before it is measured, as the tuner does it.
    """

    def __init__(self, study: WorkloadStudy, seed: int) -> None:
        self.backend: TorchBackend = study.backend
        self.bench, self.order = self.backend.bench, random.Random(seed)
        self.configurations = [c for c in study.space if not c.plain]
        self.stack = ExitStack()
        self.indices = range(len(self.backend.prompts))
        drafts = dict.fromkeys(["", *(c.draft for c in self.configurations)])
        self.opened = {(draft, i): self.prepared(draft, i) for draft in drafts for i in self.indices}
        self.rules = {c: self.bench.length(c) for c in self.configurations}
        for c, rule in self.rules.items():
            for i in self.indices if rule.learns else ():
                self.contender(c, i).run(self.backend.max_new_tokens)

    def __enter__(self) -> "Field":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def prepared(self, draft: str, index: int) -> PreparedPrompt:
        prompt, seed = self.backend.prompts[index], self.backend.seed + index
        loaded = self.bench.draft(draft) if draft else None
        return self.stack.enter_context(
            PreparedPrompt(self.bench.target, loaded, prompt.id, prompt.tokens, self.backend.sampling, seed)
        )

    def contender(self, c: Configuration, index: int, opened: PreparedPrompt | None = None) -> Contender:
        rule = FixedLength(0) if c.plain else self.rules[c]
        opened = opened or self.opened[c.draft, index]
        return Contender(opened, rule, self.bench.segments(c), c.verification)

    def grid(self) -> dict[Configuration, list[Sample]]:
        """Every configuration on every prompt, in turn with plain decoding."""
        samples: dict[Configuration, list[Sample]] = {c: [] for c in self.configurations}
        for i in self.indices:
            for c in self.order.sample(self.configurations, len(self.configurations)):
                pair = measure_pair(self.opened["", i], self.contender(c, i), self.backend.max_new_tokens, self.order)
                samples[c].append(sample_of(pair))
        return samples

    def rematch(self, answer: Configuration, oracle: Configuration, repeats: int) -> tuple[float, tuple[float, float]]:
        """Time per token of the answer over that of the oracle, and its interval."""
        if answer == oracle:
            return 1.0, (1.0, 1.0)
        rows = []
        for i in self.indices:
            # Both may use one draft, and a prepared prompt decodes one thing at a time.
            with self.prepared(answer.draft, i) as another:
                ways = [self.contender(answer, i, another), self.contender(oracle, i)]
                for _ in range(repeats):
                    ours, best = in_turn([way.begin(self.backend.max_new_tokens) for way in ways], self.order)
                    rows.append((i, [ours.wall_seconds, len(ours.tokens), best.wall_seconds, len(best.tokens)]))
        table = np.array([np.sum([row for n, row in rows if n == i], axis=0) for i in self.indices])
        return float(ratio(table)), bootstrap(len(table), lambda drawn: ratio(table[drawn]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("tuner-oracle", __doc__, "--workload json --draft prompt-lookup --length fixed --max-k 4")
    parser.add_argument("--workload", action="append", help="embedded workload or file; default: all embedded ones")
    parser.add_argument("--draft", action="append", help=f"default: {', '.join(EMBEDDED_DRAFTS)}")
    parser.add_argument(
        "--length", action="append", help=f"beside every fixed K; fixed: no other; default: {', '.join(LENGTHS)}"
    )
    parser.add_argument("--max-k", type=command.at_least(1), default=8)
    parser.add_argument("--prompts", type=command.at_least(1), default=6)
    parser.add_argument("--new-tokens", type=command.at_least(2), default=Settings.max_new_tokens)
    parser.add_argument("--rematches", type=command.at_least(1), default=4, help="of answer and oracle on each prompt")
    parser.add_argument("--seconds", type=float, default=45.0, help="the tuner's time limit per workload")
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
            more_prompts=0,
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
            try:
                for study in Tuning(request).studies:
                    begun = time.perf_counter()
                    result = study.run()
                    tuned_seconds = time.perf_counter() - begun
                    begun = time.perf_counter()
                    with Field(study, seed=chosen.seed + 1) as field:
                        measured = {c: ratio(samples_table(samples)) for c, samples in field.grid().items()}
                        grid_seconds = time.perf_counter() - begun
                        best = max(measured, key=measured.get)
                        oracle = best if measured[best] > 1.0 else PLAIN
                        answer = result.answer.configuration
                        lost, interval = field.rematch(answer, oracle, chosen.rematches)
                    rows.append(
                        {
                            "workload": study.name,
                            "answer": answer.label,
                            "oracle": oracle.label,
                            "speedup_of_answer": float(measured.get(answer, 1.0)),
                            "speedup_of_oracle": float(measured.get(oracle, 1.0)),
                            "regret": lost - 1,
                            "regret_interval": [edge - 1 for edge in interval],
                            "tuner_seconds": tuned_seconds,
                            "grid_seconds": grid_seconds,
                            "time_share": tuned_seconds / grid_seconds,
                            "trials": len(result.samples) + len(result.pruned),
                            "configurations": len(study.space) - 1,
                            "stopped": result.stopped,
                            "reason": result.answer.reason,
                            "prediction_errors": {c.label: e for c, e in result.prediction_errors.items()},
                            "errors_against_grid": {
                                c.label: float(result.survey.predicted[c] / v - 1)
                                for c, v in measured.items()
                                if c in result.survey.predicted
                            },
                        }
                    )
                    command.show(console, [grid_of(rows[-1:])])
            except KeyboardInterrupt:
                console.print("interrupted; what follows is about the workloads that are done")
    command.show(console, tables(record))
    return 0


def tables(result: dict) -> list[Grid]:
    rows = result["workloads"]
    if not rows:
        return []
    shown = grid_of(rows)
    errors = [abs(e) for row in rows for e in row["errors_against_grid"].values()]
    shown.notes = [
        f"Median regret {statistics.median(r['regret'] for r in rows):.1%}; measuring time "
        f"{sum(r['tuner_seconds'] for r in rows) / sum(r['grid_seconds'] for r in rows):.0%} of the grid's; "
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
            "regret in the rematch (90 %)",
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
                "{:.1%} ({:.1%} to {:.1%})".format(row["regret"], *row["regret_interval"]),
                f"{row['trials']} of {row['configurations']}",
                f"{row['time_share']:.0%}",
            ]
        )
    return shown
