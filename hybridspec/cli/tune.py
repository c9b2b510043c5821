"""``hybridspec tune``: which draft length each workload should use, and what it gains."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli.common import (
    DraftOption,
    NoCheckOption,
    RollbackOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    check_first,
    load_pair,
)

HELP = """Measures acceptance and step costs on each workload and finds the draft length K that decodes fastest.

Without arguments it tunes the embedded pair on the embedded workloads. Every K is measured against plain decoding of
the same prompts in the same minute; results go to OUT/profile.json, with a vLLM --speculative-config beside it for
each workload that gains. A second run with the same --out goes on where the first stopped.

Example: hybridspec tune --target ./Qwen3.5-27B --draft ./Qwen3.5-0.8B --workload prompts.jsonl --out tuned
"""

WorkloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        help="Embedded workload name or JSON Lines file; repeat for several. Default: all embedded ones.",
    ),
]


def tune(
    target: TargetOption = None,
    draft: DraftOption = None,
    workload: WorkloadOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the study, the profile and the vLLM settings.")] = Path(
        "hybridspec-tune"
    ),
    longest: Annotated[int, typer.Option("--max-k", min=1, help="Longest draft length to consider.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 48,
    trials: Annotated[int, typer.Option(min=1, help="Draft lengths to measure per workload.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time limit per workload after its first three trials; 0: none.")
    ] = 14.0,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    threads: ThreadsOption = 1,
    rollback: RollbackOption = "auto",
    no_check: NoCheckOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec import embedded
    from hybridspec.errors import InputError
    from hybridspec.tuning.profile import build_profile, write_profile
    from hybridspec.tuning.report import noise_note, results_table
    from hybridspec.tuning.study import Settings, WorkloadStudy, open_storage
    from hybridspec.tuning.workloads import find_workload

    settings = Settings(longest, prompts, max_new_tokens, trials, seconds or None, temperature, top_k, top_p, seed)
    console = Console(stderr=True)
    workloads = [find_workload(name) for name in workload or embedded.workload_files()]
    names = [w.name for w in workloads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two workloads are called {twice!r}, after their file names: rename one of the files")
    storage = open_storage(out)
    with console.status("loading target and draft"):
        check_first(target, draft, no_check)
        runner, small = load_pair(target, draft, threads, rollback)
    pair_name = f"{runner.fingerprint}+{small.runner.fingerprint} {runner.rollback} {threads}"
    studies = [WorkloadStudy(runner, small, w, settings, storage, pair_name) for w in workloads]
    for study in studies:
        study.check()

    interrupted = False
    with progress_bar(console) as bar:
        for study in studies:
            task = bar.add_task(study.workload.name, total=1.0, detail="")
            try:
                study.run(lambda text, share, task=task: bar.update(task, completed=share, detail=text))
            except KeyboardInterrupt:
                bar.update(task, detail="interrupted")
                interrupted = True
                break
            bar.update(task, completed=1.0, detail="done")
    results = [study.result() for study in studies]
    profile = build_profile(runner, small.runner, settings, results, threads)
    path = write_profile(profile, out)
    if as_json:
        json.dump(profile, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        output = Console()
        output.print(results_table(results))
        if note := noise_note(results):
            output.print(note)
        output.print(f"Profile: {path}", soft_wrap=True)
    if interrupted:
        console.print(
            f"Interrupted. What was measured is in {out}; the same command goes on from there.", soft_wrap=True
        )
        raise typer.Exit(130)


def progress_bar(console: object) -> object:
    """One line per workload, with time gone by and what is running."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:14}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )
