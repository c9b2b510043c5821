"""``hybridspec compare``: draft strategies and draft-length rules side by side, on each workload."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import (
    CompileOption,
    PackedOption,
    RollbackOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    WorkloadOption,
    check_writable,
    load_target,
)
from hybridspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from rich.console import Console

    from hybridspec.tuning.compare import ComparedConfiguration
    from hybridspec.tuning.configuration import Bench

HELP = """Compares draft strategies and draft-length rules on the same prompts: acceptance, draft cost, speed-up.

Every draft meets every rule. A draft is NAME or NAME:option=value,...: same-architecture:FOLDER, full-attention,
prompt-lookup, mtp, or one of another package. A rule is a number (fixed K), svip, adaedl, expected-gain or bandit,
with options alike. Speed-up is over plain decoding in the same interleaved run, with a 90 % interval. When greedy,
every output is checked against plain decoding's.

Example: hybridspec compare --draft same-architecture:./small --draft prompt-lookup --length 4 --length svip -w json
"""
#: What the embedded target is compared with when nothing is named; those that it cannot run are left out with a note.
DRAFTS = ("same-architecture:draft-2-layers", "same-architecture:draft-4-layers", "full-attention", "prompt-lookup")
LENGTHS = ("4", "expected-gain")


def compare(
    target: TargetOption = None,
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="Draft strategy; repeat for several.", show_default=False),
    ] = None,
    length: Annotated[
        list[str] | None,
        typer.Option("--length", "-l", help="Draft-length rule; repeat for several. Default: 4 and expected-gain."),
    ] = None,
    workload: WorkloadOption = None,
    segments: Annotated[
        bool, typer.Option("--segments", help="Each configuration with segmented verification as well.")
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="When sampling: each configuration with block verification as well.")
    ] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per prompt.")] = 1,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling and of the order of runs.")] = 0,
    threads: ThreadsOption = 1,
    rollback: RollbackOption = "auto",
    compiled: CompileOption = False,
    packed: PackedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows to this CSV file.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the speed-ups into this PNG, PDF or SVG file.", show_default=False)
    ] = None,
) -> None:
    from rich.console import Console

    from hybridspec import embedded
    from hybridspec.cli.consoles import progress_bar, table_console
    from hybridspec.decoding.sampling import Sampling
    from hybridspec.errors import InputError
    from hybridspec.runtime.compile_ahead import compile_ahead
    from hybridspec.tuning.compare import (
        ComparisonInterrupted,
        compare_workload,
        comparison_frame,
        comparison_plot,
        comparison_rows,
    )
    from hybridspec.tuning.configuration import Bench, Configuration
    from hybridspec.tuning.workloads.encoding import encode_prompt, encode_workload
    from hybridspec.tuning.workloads.sources import choose_prompts, find_workloads

    if target is not None and not draft:
        raise InputError(
            "--target needs --draft: for example --draft same-architecture:FOLDER or --draft prompt-lookup"
        )
    for path in filter(None, (csv, plot)):
        check_writable(path)
    options = LoadOptions(rollback=rollback, compile=compiled, packed=packed)
    console = Console(stderr=True)
    workloads = find_workloads(workload or embedded.workload_files())
    samplings = {
        w.name: Sampling(temperature if w.temperature is None else w.temperature, top_k, top_p) for w in workloads
    }
    if block and any(sampling.greedy for sampling in samplings.values()):
        raise InputError("--block is about sampling: give every workload a temperature above 0")
    with console.status("loading target and drafts") as status:
        runner = load_target(target, options, threads)
        bench = Bench(runner)
        drafts = _usable(bench, draft or DRAFTS, console, named=bool(draft))
        lengths = length or list(LENGTHS)
        longest = max(bench.length(Configuration("", each)).longest for each in lengths)
        measured = {
            w.name: [e.prompt for e in encode_workload(runner, w, prompts, max_new_tokens, longest)] for w in workloads
        }
        compile_ahead(runner, map(bench.draft, drafts), longest, status.update)
    configurations = [
        Configuration(d, each, segmented, verification)
        for d in drafts
        for each in lengths
        for verification in (("token", "block") if block else ("token",))
        for segmented in ((False, True) if segments else (False,))
    ]
    if segments:
        # Probes are fitted to prompts that are not measured, where there are such.
        spare = [p for w in workloads for p in w.prompts if p not in measured[w.name]]
        chosen = choose_prompts(spare or [p for w in workloads for p in w.prompts], 24)
        bench.texts = [encode_prompt(runner, p)[:256] for p in chosen]
        with console.status("fitting the probes of segmented verification"):
            bench.verifier(configurations[-1])
    results: list[ComparedConfiguration] = []
    interrupted = False
    with progress_bar(console) as bar:
        for each in workloads:
            task = bar.add_task(each.name, total=1.0, detail="")
            try:
                results += compare_workload(
                    bench,
                    each.name,
                    measured[each.name],
                    configurations,
                    max_new_tokens=each.max_new_tokens or max_new_tokens,
                    repeats=repeats,
                    sampling=samplings[each.name],
                    seed=seed,
                    progress=lambda text, share, task=task: bar.update(task, completed=share, detail=text),
                )
            except ComparisonInterrupted as stopped:
                results += stopped.results
                interrupted = True
            except KeyboardInterrupt:
                interrupted = True
            bar.update(task, completed=1.0, detail="interrupted" if interrupted else "done")
            if interrupted:
                break
    if as_json:
        json.dump({"target": runner.name, "results": comparison_rows(results)}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _print_tables(table_console(140), results)
    if csv and results:
        comparison_frame(results).to_csv(csv, index=False)
    if plot and results:
        comparison_plot(results).savefig(plot, dpi=130)
    if interrupted:
        console.print("Interrupted: the results are of what was measured until then.")
        raise typer.Exit(130)


def _usable(bench: "Bench", specs: list[str] | tuple[str, ...], console: "Console", named: bool) -> list[str]:
    """Loads the drafts. One that the user named must work; of the default ones, those that do are used."""
    from hybridspec.errors import HybridspecError

    usable = []
    for spec in specs:
        try:
            bench.draft(spec)
        except HybridspecError as error:
            if named:
                raise
            console.print(f"left out: {spec}: {error}", soft_wrap=True)
            continue
        usable.append(spec)
    return usable


def _print_tables(console: "Console", results: "list[ComparedConfiguration]") -> None:
    from rich.table import Table

    for workload in dict.fromkeys(r.workload for r in results):
        table = Table(title=workload, title_justify="left")
        headings = ("draft", "rule", "accept", "by position", "length", "cost", "speed-up (90 %)", "CPU", "of ideal")
        for heading in headings:
            table.add_column(heading, justify="left" if heading in headings[:2] else "right", overflow="fold")
        for result in (r for r in results if r.workload == workload):
            c, m = result.configuration, result.measurement
            rule = [c.length, *["segmented"] * c.segments, *["block"] * (c.verification == "block")]
            gains = m.interval[0] > 1
            table.add_row(
                c.draft.removeprefix("same-architecture:"),
                ", ".join(rule),
                "-" if m.acceptance_rate is None else f"{m.acceptance_rate:.0%}",
                " ".join(f"{a:.2f}".lstrip("0") for a in m.acceptance_by_position[:6])
                + (" ..." if len(m.acceptance_by_position) > 6 else ""),
                f"{m.acceptance_length:.2f}",
                "-" if m.draft_cost is None else f"{m.draft_cost:.2f}",
                f"{m.speedup:.2f} " + ("(one prompt)" if m.prompts == 1 else "({:.2f} to {:.2f})".format(*m.interval)),
                f"{m.cpu_speedup:.2f}",
                f"{m.efficiency:.0%}",
                style="bold" if gains else None,
            )
        console.print(table)
    console.print(
        "accept: accepted / drafted tokens; by position: share of the steps that drafted it in which position i was "
        "accepted; length: tokens per step; cost: one drafted token / one plain step; bold: the interval lies above 1."
    )
