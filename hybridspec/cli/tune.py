"""``hybridspec tune``: which draft and draft length each workload should use, and what it gains."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli.common import (
    NoCheckOption,
    RollbackOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
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
            help="Draft-length rule beside every fixed K; repeat. none: fixed K only. Default: expected-gain, svip.",
        ),
    ] = None,
    workload: WorkloadOption = None,
    out: Annotated[Path, typer.Option(help="Folder of the study, the profile and the vLLM settings.")] = Path(
        "hybridspec-tune"
    ),
    storage: Annotated[
        str | None,
        typer.Option(help="Optuna storage URL, or journal:FILE; default: a SQLite file in --out.", show_default=False),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the work; mind the cores.")] = 1,
    longest: Annotated[int, typer.Option("--max-k", min=1, help="Longest draft length to consider.")] = 8,
    segments: Annotated[bool, typer.Option("--segments", help="Consider segmented verification too.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each trial decodes each prompt.")] = 1,
    trials: Annotated[int, typer.Option(min=1, help="Configurations to measure per workload at most.")] = 6,
    seconds: Annotated[float, typer.Option(min=0, help="Time limit per workload; 0: none.")] = 20.0,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Use up trials and time, even when nothing untried can win.")
    ] = False,
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

    from hybridspec.cli.progress import progress_bar
    from hybridspec.errors import InputError
    from hybridspec.tuning.profile import write_profile
    from hybridspec.tuning.report import profile_notes, profile_table
    from hybridspec.tuning.run import EMBEDDED_DRAFTS, LENGTHS, TuneRequest, Tuning, start_workers
    from hybridspec.tuning.study import Settings

    if target is not None and not draft:
        raise InputError("--target needs --draft: the embedded drafts fit the embedded target only")
    request = TuneRequest(
        target=target,
        drafts=tuple(draft or EMBEDDED_DRAFTS),
        lengths=tuple(each for each in length or LENGTHS if each != "none"),
        segments=segments,
        workloads=tuple(workload or ()),
        out=out,
        storage=storage,
        settings=Settings(
            longest=longest,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            trials=trials,
            seconds=seconds or None,
            repeats=repeats,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            keep_going=keep_going,
        ),
        threads=threads,
        rollback=rollback,
    )
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
    if as_json:
        json.dump(profile, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        output = Console(highlight=False)
        if not output.is_terminal:
            output.width = 140
        output.print(profile_table(profile))
        for note in profile_notes(profile):
            output.print(note)
        output.print(f"Profile: {path}", soft_wrap=True)
    if interrupted:
        console.print(
            f"Interrupted. What was measured is in {out}; the same command goes on from there.", soft_wrap=True
        )
        raise typer.Exit(130)
