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

import torch

from benchmarks import command
from benchmarks.grids import Grid, number
from hybridspec import embedded
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.backends.torch_backend import TorchBackend
from hybridspec.tuning.config import EMBEDDED_DRAFTS, RULES, StudySettings, TuneConfig
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.decision import against_plain, speedup
from hybridspec.tuning.run import Tuning
from hybridspec.tuning.timed_decoding import PreparedDecoding, PreparedPrompt, in_turn
from hybridspec.tuning.workloads.encoding import EncodedPrompt


def grid(backend: TorchBackend, configurations: Sequence[Configuration], order: random.Random) -> dict:
    """Every configuration's samples, each measured as a trial measures it."""
    with backend:
        return {c: backend.measure(c, lambda *_: None) for c in order.sample(configurations, len(configurations))}


def rematch(
    backend: TorchBackend, answer: Configuration, oracle: Configuration, repeats: int, order: random.Random
) -> tuple[float, tuple[float, float]]:
    """Time per token of the answer over that of the oracle, and its interval."""
    if answer == oracle:
        return 1.0, (1.0, 1.0)
    bench, samples = backend.bench, []
    options = {c: bench.options(c, backend.max_new_tokens) for c in (answer, oracle)}
    with ExitStack() as stack:

        def prepared(c: Configuration, index: int, prompt: EncodedPrompt) -> PreparedDecoding:
            draft = None if c.plain else bench.draft(c.draft)
            seed = backend.seed + index
            own = PreparedPrompt(bench.target, draft, prompt.id, prompt.tokens, backend.sampling, seed)
            return PreparedDecoding(stack.enter_context(own), options[c])

        # Each has prompts of its own: both may use one draft, and a prepared prompt decodes one thing at a time.
        rounds = [[prepared(c, i, prompt) for c in options] for i, prompt in enumerate(backend.prompts)]
        for decoding in (decoding for both in rounds for decoding in both if decoding.options.length.learns):
            decoding.run()
        for both in rounds * repeats:
            samples.append(Sample.of(both[0].prompt.id, *in_turn([decoding.begin() for decoding in both], order)))
    return speedup(samples), against_plain(samples)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("tuner-oracle", __doc__, "--workload json --draft prompt-lookup --length fixed --max-k 4")
    parser.add_argument("--workload", action="append", help="embedded workload or file; default: all embedded ones")
    parser.add_argument("--draft", action="append", help=f"default: {', '.join(EMBEDDED_DRAFTS)}")
    parser.add_argument(
        "--length", action="append", help=f"beside every fixed K; fixed: no other; default: {', '.join(RULES)}"
    )
    parser.add_argument("--max-k", type=command.at_least(1), default=8)
    parser.add_argument("--prompts", type=command.at_least(1), default=6)
    parser.add_argument("--new-tokens", type=command.at_least(2), default=StudySettings().max_new_tokens)
    parser.add_argument("--rematches", type=command.at_least(1), default=4, help="of answer and oracle on each prompt")
    parser.add_argument("--seconds", type=float, default=45.0, help="the tuner's time limit per workload")
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.workload, chosen.draft, chosen.length = ["json"], ["prompt-lookup"], ["fixed"]
        chosen.max_k, chosen.prompts, chosen.new_tokens = 1, 1, 8
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as record:
        rows = record["workloads"] = []
        order = random.Random(chosen.seed + 1)
        with tempfile.TemporaryDirectory() as folder:
            config = TuneConfig(
                drafts=tuple(chosen.draft or EMBEDDED_DRAFTS),
                lengths=tuple(chosen.length or RULES),
                workloads=tuple(chosen.workload or embedded.workload_files()),
                out=Path(folder),
                max_k=chosen.max_k,
                prompts=chosen.prompts,
                more_prompts=0,
                max_new_tokens=chosen.new_tokens,
                seconds=chosen.seconds,
            )
            try:
                for study in Tuning(config).studies:
                    begun = time.perf_counter()
                    result = study.run()
                    tuned_seconds = time.perf_counter() - begun
                    begun = time.perf_counter()
                    tried = [c for c in study.space if not c.plain]
                    measured = {c: speedup(samples) for c, samples in grid(study.backend, tried, order).items()}
                    grid_seconds = time.perf_counter() - begun
                    best = max(measured, key=measured.get)
                    oracle = best if measured[best] > 1.0 else PLAIN
                    answer = result.answer.configuration
                    lost, interval = rematch(study.backend, answer, oracle, chosen.rematches, order)
                    rows.append(
                        {
                            "workload": study.name,
                            "answer": answer.label,
                            "oracle": oracle.label,
                            "speedup_of_answer": measured.get(answer, 1.0),
                            "speedup_of_oracle": measured.get(oracle, 1.0),
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
                                c.label: result.survey.predicted[c] / v - 1
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
