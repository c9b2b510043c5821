"""``hybridspec tune``: which draft and draft length each workload should use, and what it gains."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli.common import (
    NoCheckOption,
    TargetOption,
    TopKOption,
    TopPOption,
    WorkloadOption,
    check_first,
)

HELP = """Measures acceptance and step costs on each workload and finds the draft and draft length that decode fastest.

Without arguments it tunes the embedded target with its drafts on the embedded workloads. One survey of each draft
predicts every configuration; the best predicted are then measured against plain decoding of the same prompts in the
same minute, until no untried one can win by more than 2 %. A win inside the noise counts as a tie, and the simpler
configuration is kept. Results go to OUT/profile.json. A second run with the same --out goes on where the first stopped.

A draft is a checkpoint folder, or NAME:option=value,... of a strategy: same-architecture, full-attention,
prompt-lookup, mtp.

Example: hybridspec tune --target ./Qwen3.5-27B --draft ./Qwen3.5-0.8B --workload prompts.jsonl --out tuned
"""


def tune(
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with all of this, see configs/; flags override it.", show_default=False),
    ] = None,
    target: TargetOption = None,
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="Checkpoint folder or draft strategy; repeat for several."),
    ] = None,
    length: Annotated[
        list[str] | None,
        typer.Option(
            "--length",
            "-l",
            help="Draft-length rule beside every fixed K; repeat. fixed: no other. Default: expected-gain, svip.",
        ),
    ] = None,
    workload: WorkloadOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of study, profile and vLLM settings. Default: hybridspec-tune.", show_default=False),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Optuna storage URL, or path of a journal file; default: a SQLite file in --out.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the work; mind the cores. Default: 1.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option("--max-k", min=1, help="Longest draft length to consider. Default: 8.")
    ] = None,
    segments: Annotated[bool, typer.Option("--segments", help="Consider segmented verification too.")] = False,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per workload. Default: 3.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens generated per prompt. Default: 48.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each trial decodes each prompt.")] = 1,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Configurations to measure per workload at most. Default: 6.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Time limit of a workload's trials; 0: none. Default: 15.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Use up trials and time, even when nothing untried can win.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling. Default: 0.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; small models run best on one. Default: 1.")
    ] = None,
    rollback: Annotated[
        str | None, typer.Option(help="tape, slots, recompute, or auto (the default: tape where known).")
    ] = None,
    no_check: NoCheckOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.cli.progress import progress_bar
    from hybridspec.errors import InputError
    from hybridspec.tuning.config_file import TuneConfig, load_config
    from hybridspec.tuning.profile_file import write_profile
    from hybridspec.tuning.report import concurrency_tables, profile_notes, profile_table
    from hybridspec.tuning.reporting.write import write_report
    from hybridspec.tuning.run import TuneRequest, Tuning, start_workers

    settings = load_config(config) if config else TuneConfig()
    settings = settings.override(
        drafts=draft,
        target=target,
        lengths=length,
        workloads=workload,
        out=out,
        storage=storage,
        workers=workers,
        max_k=longest,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        trials=trials,
        seconds=seconds,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        threads=threads,
        rollback=rollback,
    )
    if settings.backend != "torch":
        raise InputError(f"backend {settings.backend!r} cannot be tuned by this version: it runs 'torch'")
    request = TuneRequest.from_config(settings, repeats=repeats, keep_going=keep_going)
    request = dataclasses.replace(request, segments=segments)
    target, out, workers = request.target, request.out, settings.workers or 1
    console = Console(stderr=True)
    with console.status("loading target and drafts"):
        check_first(target, request.drafts, no_check)
        tuning = Tuning(request)
    interrupted = False
    helpers = []
    with progress_bar(console) as bar:
        try:
            for study in tuning.studies:
                task = bar.add_task(study.name, total=1.0, detail="")
                show = lambda text, share, task=task: bar.update(task, completed=share, detail=text)  # noqa: E731
                if workers > 1:
                    with study.backend:
                        study.prepare(show)
                    if not helpers:
                        helpers = start_workers(request, workers - 1)
                study.run(show)
                bar.update(task, completed=1.0, detail="done")
            for helper in helpers:
                helper.join()
        except KeyboardInterrupt:
            bar.update(task, detail="interrupted")
            interrupted = True
    profile = tuning.profile()
    path = write_profile(profile, out)
    with console.status("drawing the report"):
        write_report(profile, out)
    if as_json:
        json.dump(profile, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        output = Console(highlight=False)
        if not output.is_terminal and "COLUMNS" not in os.environ:
            output.width = 140
        output.print(profile_table(profile))
        for table in concurrency_tables(profile):
            output.print(table)
        for note in profile_notes(profile):
            output.print(note, markup=False)
        output.print(f"Profile: {path}, report: {out / 'report.html'}", soft_wrap=True, markup=False)
    if interrupted:
        console.print(
            f"Interrupted. What was measured is in {out}; the same command goes on from there.", soft_wrap=True
        )
        raise typer.Exit(130)
