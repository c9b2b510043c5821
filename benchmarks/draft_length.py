"""Draft-length rules on a stream whose predictability changes half-way, against the best fixed K of each half.

The stream is the prompts of one embedded workload, then those of another. A rule is made once for each repetition and
lives through the whole stream: it has to learn in the first half and to notice the second. On each prompt plain
decoding, every fixed K and every rule take turns slice by slice, each from a prefill of its own. Ctrl-C ends it with
the prompts that are done. A ratio to the best fixed K is paired by prompt and repetition, with a 90 % bootstrap
interval; the best K of a half is picked afterwards by CPU time, so the best of several noisy numbers flatters it a
little. CPU time is the steadier clock where a machine is shared.
"""

import argparse
import random
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks import command
from benchmarks.grids import Grid, number, share, spread
from hybridspec import embedded
from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Statistics
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.drafts.registry import make_length
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.decision import against_plain, speedup
from hybridspec.tuning.timed_decoding import PreparedPrompt, in_turn
from hybridspec.tuning.workloads.encoding import encode_prompt
from hybridspec.tuning.workloads.sources import choose_prompts, find_workload

PLAIN = "0"
RULES = ("svip", "adaedl", "expected-gain", "bandit")
CLOCKS = {"cpu": "cpu_seconds", "wall": "wall_seconds"}
#: Way of decoding -> its runs of one half, repetition by repetition and prompt by prompt.
Runs = dict[str, list[TimedGeneration]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("draft-length", __doc__, "--first json --second prose --rules svip expected-gain")
    parser.add_argument("--first", default="json", help="workload of the first half: an embedded one or a file")
    parser.add_argument("--second", default="prose", help="workload of the second half")
    parser.add_argument("--draft", default=embedded.DEFAULT_DRAFT, choices=list(embedded.DRAFTS))
    parser.add_argument("--k", type=command.at_least(1), nargs="+", default=[1, 2, 3, 4, 5, 6], help="fixed lengths")
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="for example svip:threshold=0.2,longest=8")
    parser.add_argument("--prompts", type=command.at_least(1), default=6, help="of each half")
    parser.add_argument("--new-tokens", type=command.at_least(1), default=64)
    parser.add_argument("--repeats", type=command.at_least(1), default=2)
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.k, chosen.prompts, chosen.new_tokens, chosen.repeats = chosen.k[:1], 1, 8, 1
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as result:
        target = TargetRunner.from_pretrained(embedded.TARGET)
        draft = SameArchitectureDraft(TargetRunner.from_pretrained(embedded.DRAFTS[chosen.draft]))
        prompts = {
            f"{half}: {name}": choose_prompts(find_workload(name).prompts, chosen.prompts)
            for half, name in (("first", chosen.first), ("second", chosen.second))
        }
        halves = run_stream(target, draft, prompts, chosen, console)
        result["halves"] = {half: report(runs, [p.id for p in prompts[half]]) for half, runs in halves.items()}
    command.show(console, tables(result))
    return 0


def run_stream(
    target: TargetRunner,
    draft: SameArchitectureDraft,
    prompts: dict[str, list],
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Runs]:
    names = [PLAIN, *(str(k) for k in options.k), *options.rules]
    halves: dict[str, Runs] = {half: {name: [] for name in names} for half in prompts}
    stream = [(half, prompt) for half, chosen in prompts.items() for prompt in chosen]
    rules: dict[str, DraftLength] = {}
    todo = [(repeat, at) for repeat in range(options.repeats) for at in range(len(stream))]
    order = random.Random(options.seed)
    try:
        for _, at in track(todo, "prompts", console=console, disable=not console.is_terminal):
            if at == 0:
                rules = {name: make_length(name) for name in names}
            half, prompt = stream[at]
            tokens = encode_prompt(target, prompt)
            with ExitStack() as stack:
                running = []
                for name, rule in rules.items():
                    own = PreparedPrompt(target, None if name == PLAIN else draft, prompt.id, tokens, Sampling(), 0)
                    running.append(stack.enter_context(own).begin(DecodeOptions(rule, options.new_tokens)))
                generations = in_turn(running, order)
            for name, generation in zip(rules, generations, strict=True):
                halves[half][name].append(generation)
    except KeyboardInterrupt:
        done = sum(len(runs[PLAIN]) for runs in halves.values())
        console.print(f"interrupted after {done} of {len(todo)} prompts; what follows is about those")
    return {half: runs for half, runs in halves.items() if runs[PLAIN]}


def report(runs: Runs, ids: list[str]) -> dict[str, dict]:
    """Speed-up of each way over plain decoding, and its ratio to the best fixed K."""
    to_plain = {name: paired(runs, PLAIN, name, ids) for name in runs}
    fixed = [name for name in runs if name.isdecimal()]
    best = max(fixed, key=lambda name: speedup(to_plain[name], "cpu"))
    ways = {}
    for name, of_way in runs.items():
        counts = Statistics([step for run in of_way for step in run.steps]).counts
        to_best = paired(runs, best, name, ids)
        ways[name] = {
            "fixed": name in fixed,
            "best_fixed": name == best,
            "tokens": sum(len(run.tokens) for run in of_way),
            "drafted_per_step": counts.draft_length,
            "acceptance_rate": counts.rate,
            "acceptance_length": counts.length(),
            "outputs_that_differ": sum(a.tokens != b.tokens for a, b in zip(of_way, runs[PLAIN], strict=True)),
            **{
                clock: {
                    "median_milliseconds_per_token": float(
                        np.median([1e3 * getattr(run, field) / len(run.tokens) for run in of_way])
                    ),
                    "speedup": speedup(to_plain[name], clock),
                    "interval_90": against_plain(to_plain[name], clock),
                    "ratio_to_best_fixed": speedup(to_best, clock),
                    "ratio_interval_90": against_plain(to_best, clock),
                }
                for clock, field in CLOCKS.items()
            },
        }
    return ways


def paired(runs: Runs, base: str, name: str, ids: list[str]) -> list[Sample]:
    """The runs of ``name`` beside those of ``base`` on the same prompt in the same repetition."""
    return [
        Sample.of(ids[i % len(ids)], plain, other)
        for i, (plain, other) in enumerate(zip(runs[base], runs[name], strict=True))
    ]


def tables(result: dict) -> list[Grid]:
    grids = []
    for half, ways in result["halves"].items():
        best = next(name for name, way in ways.items() if way["best_fixed"])
        differ = sum(way["outputs_that_differ"] for way in ways.values())
        grid = Grid(
            f"{half}; best fixed K: {best}; outputs that differ from plain decoding: {differ}",
            ("", "K", "acceptance", "tau", "CPU ms/token", "CPU speed-up (90 %)", "to best, CPU (90 %)", "wall"),
        )
        for name, way in ways.items():
            cpu = way["cpu"]
            grid.rows.append(
                [
                    f"K = {name}" if way["fixed"] else name,
                    number(way["drafted_per_step"], 1),
                    share(way["acceptance_rate"]),
                    number(way["acceptance_length"]),
                    number(cpu["median_milliseconds_per_token"], 1),
                    spread(cpu["speedup"], cpu["interval_90"]),
                    spread(cpu["ratio_to_best_fixed"], cpu["ratio_interval_90"], 3),
                    number(way["wall"]["ratio_to_best_fixed"], 3),
                ]
            )
        grids.append(grid)
    return grids
