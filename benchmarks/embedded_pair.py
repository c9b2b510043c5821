"""A sweep of K over the embedded workloads: transformers' generate, our plain and our speculative decoding.

Every K of ours decodes a prompt slice by slice in turn, and generate runs before or after them; prefill is taken off.
Ratios are to our plain decoding of the same prompt, pooled per workload, with bootstrap intervals over prompts. Two
efficiencies tell the loop's own overhead, measured / ideal speed-up: of the drafting and verifying that the loop clocks
itself, and of bare passes that are clocked alone (plain step, draft pass of one token, target pass of each width, on
the same prompts).
"""

import argparse
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from benchmarks import command
from benchmarks.decoders import Generate
from benchmarks.grids import Grid, number, share
from benchmarks.result_rows import HEADINGS, cells, row_of
from hybridspec import embedded
from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.options import DecodeOptions
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.cost_model import measure_verify
from hybridspec.tuning.timed_decoding import PreparedPrompt, in_turn
from hybridspec.tuning.workloads.encoding import encode_prompt
from hybridspec.tuning.workloads.sources import choose_prompts, find_workload

GENERATE = "generate"


@dataclass(frozen=True)
class Alone:
    """Seconds of bare passes on one prompt.

    A plain step, a draft pass of one token, target passes by the number of drafted tokens.
    """

    plain: float
    draft: float
    verify: list[float]

    def ideal_speedup(self, generation: TimedGeneration) -> float:
        """Of the steps that it took."""
        passes = sum(step.drafted * self.draft + self.verify[step.drafted] for step in generation.steps)
        return len(generation.tokens) * self.plain / passes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.options("embedded-pair", __doc__, "--workload json --k 2 4 --save")
    parser.add_argument("--workload", action="append", help="embedded workload or file; default: all embedded ones")
    parser.add_argument("--draft", default=embedded.DEFAULT_DRAFT, choices=list(embedded.DRAFTS))
    parser.add_argument("--k", type=command.at_least(1), nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--prompts", type=command.at_least(1), default=4)
    parser.add_argument("--new-tokens", type=command.at_least(2), default=64)
    parser.add_argument("--repeats", type=command.at_least(1), default=2)
    chosen = parser.parse_args(arguments)
    if chosen.smoke:
        chosen.workload, chosen.k = (chosen.workload or ["json"])[:1], chosen.k[:1]
        chosen.prompts, chosen.new_tokens, chosen.repeats = 1, 8, 1
    torch.set_num_threads(chosen.threads)
    console = command.console()
    with command.recorded(chosen, console) as result:
        result["workloads"] = {}
        target = TargetRunner.from_pretrained(embedded.TARGET)
        generate = Generate(embedded.TARGET)
        draft = SameArchitectureDraft(TargetRunner.from_pretrained(embedded.DRAFTS[chosen.draft]))
        try:
            for name in chosen.workload or embedded.workload_files():
                console.print(name)
                result["workloads"][name] = measure(target, draft, generate, name, chosen)
        except KeyboardInterrupt:
            console.print("interrupted; what follows is about the workloads that are done")
    command.show(console, tables(result))
    return 0


def measure(
    target: TargetRunner, draft: SameArchitectureDraft, generate: Generate, name: str, chosen: argparse.Namespace
) -> dict:
    samples: dict[str, list[Sample]] = {}
    efficiencies: dict[str, list[float]] = {}
    costs: list[Alone] = []
    mismatches = 0
    order = random.Random(chosen.seed)
    for prompt in choose_prompts(find_workload(name).prompts, chosen.prompts):
        tokens = encode_prompt(target, prompt)
        with ExitStack() as stack:
            prepared = {
                k: stack.enter_context(
                    PreparedPrompt(target, draft if k else None, prompt.id, tokens, Sampling(), chosen.seed)
                )
                for k in (0, *chosen.k)
            }
            costs.append(alone(prepared[0], draft, chosen))
            for _ in range(chosen.repeats):
                found: dict[str | int, TimedGeneration] = {}
                for which in order.sample((GENERATE, "ours"), 2):
                    if which == GENERATE:
                        found[GENERATE] = generate.decode(tokens, chosen.new_tokens, 0)
                        continue
                    running = [p.begin(DecodeOptions(FixedLength(k), chosen.new_tokens)) for k, p in prepared.items()]
                    found |= zip(prepared, in_turn(running, order), strict=True)
                plain = found[0]
                for way, generation in found.items():
                    mismatches += generation.tokens != plain.tokens
                    if not generation.timed_tokens:
                        continue
                    label = way if way == GENERATE else f"K = {way}"
                    samples.setdefault(label, []).append(Sample.of(prompt.id, plain, generation))
                    if generation.steps and way:
                        measured = plain.wall_seconds / generation.wall_seconds
                        efficiencies.setdefault(label, []).append(measured / costs[-1].ideal_speedup(generation))
    middle = lambda values: float(torch.tensor(values).quantile(0.5))  # noqa: E731
    return {
        "ways": {
            way: row_of(rows) | {"efficiency_alone": middle(efficiencies[way]) if way in efficiencies else None}
            for way, rows in sorted(samples.items(), key=lambda item: (item[0] != GENERATE, item[0]))
        },
        "outputs_that_differ": mismatches,
        "c": middle([cost.draft / cost.plain for cost in costs]),
        "v": {k: middle([cost.verify[k] / cost.plain for cost in costs]) for k in chosen.k},
        "plain_step_seconds": middle([cost.plain for cost in costs]),
    }


def alone(prepared: PreparedPrompt, draft: SameArchitectureDraft, chosen: argparse.Namespace) -> Alone:
    repeats = 2 if chosen.smoke else 5
    plain, verify = measure_verify(prepared, max(chosen.k), repeats)
    with PreparedPrompt(draft.runner, None, prepared.id, prepared.tokens, Sampling(), 0) as drafting:
        _, (draft_pass,) = measure_verify(drafting, 0, repeats)
    return Alone(plain, draft_pass, verify)


def tables(result: dict) -> list[Grid]:
    grids = []
    for name, workload in result["workloads"].items():
        v = ", ".join(f"v({k}) {ratio:.2f}" for k, ratio in workload["v"].items())
        grid = Grid(
            f"{name}: c {workload['c']:.3f}, {v}; outputs that differ from plain: {workload['outputs_that_differ']}",
            ("", *HEADINGS, "ideal", "efficiency", "of passes alone"),
        )
        for way, row in workload["ways"].items():
            grid.rows.append(
                [
                    way,
                    *cells(row),
                    number(row["ideal_speedup"]),
                    share(row["efficiency"]),
                    share(row["efficiency_alone"]),
                ]
            )
        grids.append(grid)
    return grids
