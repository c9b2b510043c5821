"""``hybridspec tune``: which draft and draft length each workload should use, and what it gains."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import CompileOption, NoCheckOption, PackedOption, WorkloadOption, check_first
from hybridspec.tuning.config import TuneConfig

if TYPE_CHECKING:
    from rich.console import Console

    from hybridspec.tuning.backends.server_run import ServerTuning
    from hybridspec.tuning.backends.vllm_run import VllmTuning
    from hybridspec.tuning.config import ServingOptions
    from hybridspec.tuning.profile import Profile
    from hybridspec.tuning.run import Tuning

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


def option(name: str, *flags: str, **more: object) -> object:
    """The command line's option for a setting of :class:`~hybridspec.tuning.config.TuneConfig`."""
    field = TuneConfig.model_fields[name]
    least = next((m.ge for m in field.metadata if hasattr(m, "ge")), None)
    text = field.description or ""
    told = field.get_default()
    if told is not None and told is not False and told != () and "efault" not in text:
        text += f" Default: {told}."
    return typer.Option(*flags, help=text, min=least, show_default=False, **more)


def tune(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with all of this, see configs/; flags override it.", show_default=False),
    ] = None,
    target: Annotated[Path | None, option("target")] = None,
    drafts: Annotated[list[str] | None, option("drafts", "--draft", "-d")] = None,
    lengths: Annotated[list[str] | None, option("lengths", "--length", "-l")] = None,
    workloads: WorkloadOption = None,
    out: Annotated[Path | None, option("out")] = None,
    storage: Annotated[str | None, option("storage")] = None,
    workers: Annotated[int | None, option("workers")] = None,
    max_k: Annotated[int | None, option("max_k", "--max-k")] = None,
    segments: Annotated[bool, option("segments", "--segments")] = False,
    prompts: Annotated[int | None, option("prompts")] = None,
    more_prompts: Annotated[int | None, option("more_prompts")] = None,
    max_new_tokens: Annotated[int | None, option("max_new_tokens")] = None,
    repeats: Annotated[int | None, option("repeats")] = None,
    trials: Annotated[int | None, option("trials")] = None,
    seconds: Annotated[float | None, option("seconds")] = None,
    keep_going: Annotated[bool, option("keep_going", "--keep-going")] = False,
    temperature: Annotated[float | None, option("temperature")] = None,
    top_k: Annotated[int | None, option("top_k", "--top-k")] = None,
    top_p: Annotated[float | None, option("top_p", "--top-p")] = None,
    seed: Annotated[int | None, option("seed", max=2**63 - 1)] = None,
    backend: Annotated[str | None, option("backend")] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Address of a running server, for --backend server; repeat for several.", show_default=False),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time, for vllm and server; repeat. Default: 1.", show_default=False),
    ] = None,
    python: Annotated[str | None, option("python")] = None,
    threads: Annotated[int | None, option("threads")] = None,
    rollback: Annotated[str | None, option("rollback")] = None,
    compile: CompileOption = False,
    packed: PackedOption = False,
    no_check: NoCheckOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.cli.consoles import progress_bar
    from hybridspec.tuning.config_file import load_config
    from hybridspec.tuning.reporting.write import write_report
    from hybridspec.tuning.run import start_workers

    said = load_config(config) if config else TuneConfig()
    flags = {name: value for name, value in context.params.items() if name in TuneConfig.model_fields}
    chosen = said.override(**flags, serving=serving_flags(said, url, concurrency))
    check_backend(chosen)
    console = Console(stderr=True)
    tuning = open_tuning(chosen, no_check, console)
    interrupted = False
    helpers = []
    with progress_bar(console) as bar:
        try:
            for study in tuning.studies:
                task = bar.add_task(study.name, total=1.0, detail="")
                tell = lambda text, share, task=task: bar.update(task, completed=share, detail=text)  # noqa: E731
                if chosen.workers > 1:
                    with study.backend:
                        study.prepare(tell)
                    if not helpers:
                        helpers = start_workers(chosen, chosen.workers - 1)
                study.run(tell)
                bar.update(task, completed=1.0, detail="done")
            for helper in helpers:
                helper.join()
        except KeyboardInterrupt:
            bar.update(task, detail="interrupted")
            interrupted = True
    profile = tuning.profile()
    path = profile.save(chosen.out)
    with console.status("drawing the report"):
        write_report(profile, chosen.out)
    show(profile, path, as_json)
    if interrupted:
        again = "begins anew" if chosen.backend == "server" else "goes on from there"
        console.print(f"Interrupted. What was measured is in {chosen.out}; the same command {again}.", soft_wrap=True)
        raise typer.Exit(130)


def serving_flags(config: TuneConfig, url: list[str] | None, concurrency: list[int] | None) -> "ServingOptions | None":
    """What the file says of serving, with the flags that were given in its place."""
    given = {name: tuple(value) for name, value in (("url", url), ("concurrency", concurrency)) if value}
    return config.serving.model_copy(update=given) if given else None


def check_backend(config: TuneConfig) -> None:
    """Raises :class:`InputError` for options that another backend takes."""
    from hybridspec.errors import InputError

    backend = config.backend
    if config.python is not None and backend != "vllm":
        raise InputError(f"--python names vLLM's interpreter, and the backend is {backend}: add --backend vllm")
    if config.serving.url and backend == "torch":
        raise InputError("--url names a running server, and the backend is torch: add --backend server")
    if backend != "torch" and config.workers > 1:
        raise InputError(f"--workers: backend {backend} measures one thing at a time, so that nothing disturbs it")


def open_tuning(config: TuneConfig, no_check: bool, console: "Console") -> "Tuning | VllmTuning | ServerTuning":
    """Checks and opens what is to be tuned."""
    from hybridspec.tuning.run import Tuning

    if config.backend == "server":
        from hybridspec.tuning.backends.server_run import ServerTuning

        with console.status("asking the servers"):
            return ServerTuning(config)
    with console.status("loading target and drafts") as status:
        check_first(config.target, config.draft_specs, no_check)
        if config.backend == "torch":
            return Tuning(config, status.update)
        from hybridspec.tuning.backends.vllm_run import VllmTuning

        tuning = VllmTuning(config)
    for draft, reason in tuning.left_out.items():
        console.print(f"{draft} is left out. {reason}", soft_wrap=True, highlight=False, markup=False)
    return tuning


def show(profile: "Profile", path: Path, as_json: bool) -> None:
    """The profile on standard output."""
    from hybridspec.cli.consoles import table_console
    from hybridspec.tuning.reporting.terminal import concurrency_tables, profile_notes, profile_table

    if as_json:
        json.dump(profile.to_dict(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    output = table_console(150)
    output.print(profile_table(profile))
    for table in concurrency_tables(profile):
        output.print(table)
    for note in profile_notes(profile):
        output.print(note, markup=False)
    output.print(f"Profile: {path}, report: {path.with_name('report.html')}", soft_wrap=True, markup=False)
