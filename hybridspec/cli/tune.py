"""``hybridspec tune``: which draft and draft length each workload should use, and what it gains."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import (
    CompileOption,
    NoCheckOption,
    PackedOption,
    TargetOption,
    TopKOption,
    TopPOption,
    WorkloadOption,
    check_first,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hybridspec.tuning.backends.server_run import ServerTuning
    from hybridspec.tuning.backends.vllm_run import VllmTuning
    from hybridspec.tuning.config_file import ServingOptions, TuneConfig
    from hybridspec.tuning.run import TuneRequest, Tuning

HELP = """Measures acceptance and step costs on each workload and finds the draft and draft length that decode fastest.

Without arguments it tunes the embedded target with its drafts on the embedded workloads. One survey of each draft
predicts every configuration; the best predicted are then measured against plain decoding of the same prompts in the
same minute, until no untried one can win by more than 2 %. A win inside the noise counts as a tie, and the simpler
configuration is kept. Results go to OUT/profile.json. A second run with the same --out goes on where the first stopped.

--backend vllm tunes vLLM's offline engine instead, in a process of --python, for each --concurrency: plain decoding and
each draft at the largest K are timed, a K between is predicted, and the best few are confirmed by runs of their own.
--backend server measures running servers at --url: one tells what its K gives and what others would have to cost;
several with different K, one of them without speculation, tell the best K.

A draft is a checkpoint folder, or NAME:option=value,... of a strategy: same-architecture, full-attention,
prompt-lookup, mtp.

Example: hybridspec tune --target ./Qwen3.5-27B --draft ./Qwen3.5-0.8B --workload prompts.jsonl --out tuned

Example: hybridspec tune --backend vllm --python ~/vllm/bin/python --target ./Qwen3.5-27B --draft mtp --concurrency 1
--concurrency 16

Example: hybridspec tune --backend server --url http://127.0.0.1:8000 --concurrency 8 --workload prompts.jsonl
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
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per workload. Default: 4.")] = None,
    more_prompts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="At most this many extra prompts, measured only where a gain worth having lies inside the noise; "
            "0: never. Default: as many as --prompts.",
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens generated per prompt. Default: 48.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each trial decodes each prompt.")] = 1,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Configurations to measure per workload at most. Default: 6; vllm: 3.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Time limit of a workload's trials; 0: none. Default: 30; vllm: none."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Use up trials and time, even when nothing untried can win.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling. Default: 0.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="torch, vllm or server. Default: torch.", show_default=False)
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Address of a running server, for --backend server; repeat for several.", show_default=False),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time, for vllm and server; repeat. Default: 1.", show_default=False),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter that has vLLM, for --backend vllm. Default: this one.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; small models run best on one. Default: 1.")
    ] = None,
    rollback: Annotated[
        str | None, typer.Option(help="tape, slots, recompute, or auto (the default: tape where known).")
    ] = None,
    compiled: CompileOption = False,
    packed: PackedOption = False,
    no_check: NoCheckOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.cli.consoles import progress_bar
    from hybridspec.tuning.config_file import TuneConfig, load_config
    from hybridspec.tuning.profile_file import write_profile
    from hybridspec.tuning.reporting.write import write_report
    from hybridspec.tuning.run import TuneRequest, start_workers

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
        more_prompts=more_prompts,
        max_new_tokens=max_new_tokens,
        trials=trials,
        seconds=seconds,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        threads=threads,
        rollback=rollback,
        compile=compiled or None,
        packed=packed or None,
        backend=backend,
        serving=serving_flags(settings, url, concurrency),
    )
    check_backend(settings, python)
    request = TuneRequest.from_config(settings, repeats=repeats, keep_going=keep_going)
    request = dataclasses.replace(request, segments=segments, python=python or request.python)
    out, workers = request.out, settings.workers or 1
    console = Console(stderr=True)
    tuning = open_tuning(request, no_check, console)
    interrupted = False
    helpers = []
    with progress_bar(console) as bar:
        try:
            for study in tuning.studies:
                task = bar.add_task(study.name, total=1.0, detail="")
                tell = lambda text, share, task=task: bar.update(task, completed=share, detail=text)  # noqa: E731
                if workers > 1:
                    with study.backend:
                        study.prepare(tell)
                    if not helpers:
                        helpers = start_workers(request, workers - 1)
                study.run(tell)
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
    show(profile, path, as_json)
    if interrupted:
        again = "begins anew" if request.backend == "server" else "goes on from there"
        console.print(f"Interrupted. What was measured is in {out}; the same command {again}.", soft_wrap=True)
        raise typer.Exit(130)


def serving_flags(settings: "TuneConfig", url: list[str] | None, concurrency: list[int] | None) -> "ServingOptions":
    """What the file says of serving, with the flags that were given in its place."""
    given = {"url": tuple(url or ()), "concurrency": tuple(concurrency or ())}
    return dataclasses.replace(settings.serving, **{name: value for name, value in given.items() if value})


def check_backend(settings: "TuneConfig", python: str | None) -> None:
    """Raises :class:`InputError` for options that another backend takes."""
    from hybridspec.errors import InputError

    backend = settings.backend
    if python is not None and backend != "vllm":
        raise InputError(f"--python names vLLM's interpreter, and the backend is {backend}: add --backend vllm")
    if settings.serving.url and backend == "torch":
        raise InputError("--url names a running server, and the backend is torch: add --backend server")
    if backend != "torch" and (settings.workers or 1) > 1:
        raise InputError(f"--workers: backend {backend} measures one thing at a time, so that nothing disturbs it")


def open_tuning(request: "TuneRequest", no_check: bool, console: "Console") -> "Tuning | VllmTuning | ServerTuning":
    """Checks and opens what is to be tuned."""
    from hybridspec.tuning.run import Tuning

    if request.backend == "server":
        from hybridspec.tuning.backends.server_run import ServerTuning

        with console.status("asking the servers"):
            return ServerTuning(request)
    with console.status("loading target and drafts") as status:
        check_first(request.target, request.drafts, no_check)
        if request.backend == "torch":
            return Tuning(request, status.update)
        from hybridspec.tuning.backends.vllm_run import VllmTuning

        tuning = VllmTuning(request)
    for draft, reason in tuning.left_out.items():
        console.print(f"{draft} is left out. {reason}", soft_wrap=True, highlight=False, markup=False)
    return tuning


def show(profile: dict, path: Path, as_json: bool) -> None:
    """The profile on standard output."""
    from hybridspec.cli.consoles import table_console
    from hybridspec.tuning.reporting.terminal import concurrency_tables, profile_notes, profile_table

    if as_json:
        json.dump(profile, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    output = table_console(150)
    output.print(profile_table(profile))
    for table in concurrency_tables(profile):
        output.print(table)
    for note in profile_notes(profile):
        output.print(note, markup=False)
    output.print(f"Profile: {path}, report: {path.with_name('report.html')}", soft_wrap=True, markup=False)
