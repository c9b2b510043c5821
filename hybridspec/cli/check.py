"""``hybridspec check``: does a checkpoint fit its config, and a draft its target?"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hybridspec.checkpoints.findings import Report

HELP = """Finds what makes a hybrid model or its draft fail silently: layer sequence, tensors, tokenizers, state types,
stop tokens, memory, and what engines do with the pair.

Only configs, tokenizer files and safetensors headers are read; no weight, no pickle, no code of a checkpoint. --run
loads both models and compares logits and acceptance. Without TARGET, checks the embedded pair. Exit status: 0 nothing
wrong, 1 errors (with --strict, warnings too), 2 something could not be read.

Example: hybridspec check ./Qwen3.5-27B ./Qwen3.5-0.8B --engine vllm --gpu-memory 80
"""
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
VERDICTS = {"works": "green", "slow": "yellow", "refused": "red", "wrong": "red", "not as asked": "red"}
ENGINE_CODES = {"refused": "HS601", "wrong": "HS602", "not as asked": "HS603"}
#: Columns of output that is not a terminal.
PLAIN_WIDTH = 120


def check(
    target: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder. Default: the embedded target.", show_default=False)
    ] = None,
    draft: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder of a draft for it.", show_default=False)
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One line per layer.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Engine to judge the pair for: transformers, vllm, sglang, llama.cpp, ...")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=0, help="Draft length, for the slots that states take.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for memory.")] = 8192,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB; tells how many sequences fit.", show_default=False)
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Load the models and compare what they compute.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --run: compare torch.compile with eager too; takes minutes.")
    ] = False,
    run_length: Annotated[int, typer.Option(min=16, help="Tokens of the long text of --run.")] = 8192,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings too make the exit status 1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec import embedded
    from hybridspec.checker.check import check as checked
    from hybridspec.cli.consoles import table_console
    from hybridspec.errors import InputError

    if target is None:
        target, draft = embedded.TARGET, embedded.DRAFTS[embedded.DEFAULT_DRAFT]
    with Console(stderr=True).status("reading configs, tokenizers and headers") as status:
        if compiled and not run:
            raise InputError("--compile needs --run")
        report = checked(target, draft, k=k, length=length, gpu_memory=gpu_memory, engine=engine)
        if run and not report.unreadable:
            from hybridspec.tuning.model_checks import run_models

            report.run, findings = run_models(target, draft, run_length, status.update, compiled)
            report.add(findings)
    if as_json:
        json.dump(report.to_dict() | {"exit_status": report.exit_status(strict)}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        console = table_console(PLAIN_WIDTH)
        show(console, report, layers, strict)
    if status := report.exit_status(strict):
        raise typer.Exit(status)


def show(console: "Console", report: "Report", layers: bool = False, strict: bool = False) -> None:
    """The report as tables."""
    for name, facts in (("Target", report.target), ("Draft", report.draft)):
        if facts:
            _checkpoint(console, name, facts, layers)
    if report.memory:
        _memory(console, report.memory)
    if report.engines:
        console.print(_engines(report.engines))
    if report.run:
        _run(console, report.run)
    # The table of engines has said these.
    told = [f for f in report.findings if not (f.severity == "note" and f.code in ENGINE_CODES.values())]
    if told:
        console.print(findings_table(told))
    counts = {severity: len(report.of(severity)) for severity in COLOURS}
    parts = [f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count]
    verdict = ", ".join(parts) if parts else "nothing found"
    if not report.errors and not (strict and report.warnings):
        verdict = f"[green]OK[/green]: no errors ({verdict})"
    else:
        verdict = f"[red]{verdict}[/red]"
    console.print(f"{verdict}. hybridspec explain CODE tells more." if report.findings else f"{verdict}.")


def _grid() -> "Table":
    from rich.table import Table

    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _checkpoint(console: "Console", name: str, facts: dict[str, Any], every_layer: bool) -> None:
    from rich.markup import escape

    console.print(f"[bold]{name}[/bold] {escape(facts['path'])}", soft_wrap=True)
    if "model_type" not in facts:
        return
    parts = [facts["model_type"]]
    if facts["parameters"]:
        parts.append(f"{_count(facts['parameters'])} parameters in {_bytes(facts['weights_bytes'])}")
    parts.append(f"{facts['tensors']} tensors in {facts['files']} file{'s' * (facts['files'] != 1)}")
    if facts["context_length"]:
        parts.append(f"context {facts['context_length']}")
    parts += [facts["quantisation"]] if facts["quantisation"] else []
    parts += ["prediction head"] if facts["prediction_head"] else []
    grid = _grid()
    grid.add_row("model", escape(", ".join(parts)))
    layers, tokenizer = facts["layers"], facts["tokenizer"]
    if layers.get("config"):
        grid.add_row("layers", f"{layers['count']}: {layers['config']}  [dim]({escape(layers['source'])})[/dim]")
    if layers.get("tensors"):
        fits = layers.get("first_difference") is None and layers.get("config")
        grid.add_row("tensors", f"{'agree' if fits else layers['tensors']}{_mixers(layers['mixers'])}")
    if tokenizer["file"]:
        padding = tokenizer["padding"]
        rows = f", {tokenizer['vocab_size']} rows" if tokenizer["vocab_size"] else ""
        rows += f" ({padding} of them padding)" if padding and padding > 0 else ""
        tokens = f"{tokenizer['kind']} with {tokenizer['tokens']} tokens" if tokenizer["tokens"] else tokenizer["file"]
        same = (tokenizer.get("against_target") or {}).get("same")
        against = {True: "; the target's", False: "; [red]not the target's[/red]", None: ""}[same]
        grid.add_row("tokenizer", f"{tokens}{rows}, stops at {tokenizer['stop_ids'] or 'nothing'}{against}")
    console.print(grid)
    if every_layer:
        console.print(_layers(layers))


def _mixers(mixers: list[str | None]) -> str:
    names = sorted({mixer for mixer in mixers if mixer})
    return f"  [dim]({', '.join(names)})[/dim]" if names else ""


def _layers(layers: dict[str, Any]) -> "Table":
    from rich.table import Table

    from hybridspec.checkpoints.layer_kinds import agree

    table = Table("layer", "config", "tensors", "mixer", "", box=None, pad_edge=False)
    config, tensors, mixers = layers.get("kinds", []), layers.get("tensor_kinds", []), layers.get("mixers", [])
    for index in range(max(len(config), len(tensors))):
        ours, theirs = (kinds[index] if index < len(kinds) else None for kinds in (config, tensors))
        differs = bool(tensors) and (not agree(ours, theirs) or (ours is None) != (theirs is None))
        mixer = mixers[index] if index < len(mixers) else None
        mark = "[red]differs[/red]" if differs else ""
        table.add_row(str(index), ours or "-", theirs or "-", mixer or "", mark)
    return table


def _memory(console: "Console", memory: dict[str, Any]) -> None:
    from rich.markup import escape

    if "unknown" in memory:
        console.print(f"[bold]Memory[/bold] not known: {escape(memory['unknown'])}")
        return
    console.print(f"[bold]Memory[/bold] of a sequence of {memory['length']} tokens, K = {memory['k']}")
    grid = _grid()
    for group in memory["layers"]:
        parts = []
        if group["state_shape"]:
            parts.append(f"state {group['state_shape']} {group['state_dtype']}")
        parts += [f"window {shape} {group['window_dtype']}" for shape in group["window_shapes"]]
        if group["state_bytes"]:
            parts.append(_bytes(group["state_bytes"]))
        if group["kv_bytes_per_token"]:
            window = f" in a window of {group['sliding_window']}" if group["sliding_window"] else ""
            parts.append(f"{_bytes(group['kv_bytes_per_token'])} per token{window}")
        grid.add_row(f"{group['layers']:3} {group['kind']}", escape(", ".join(parts) or "nothing"))
    grid.add_row(
        "states",
        f"{_bytes(memory['state_bytes'])}; with {memory['slot_factor']} slots, as in vLLM, "
        f"{_bytes(memory['state_bytes_with_slots'])}",
    )
    grid.add_row("keys, values", f"{_bytes(memory['kv_bytes'])}; the larger part: {memory['larger_pool']}")
    if memory["draft_bytes"]:
        grid.add_row("draft", f"{_bytes(memory['draft_bytes'])} with slots, keys and values")
    if memory["sequences"]:
        total = memory["weights_bytes"] + memory["draft_weights_bytes"]
        grid.add_row(
            "fit",
            f"{memory['sequences']['plain']} sequences plain, {memory['sequences']['speculative']} with speculation, "
            f"in 90 % of {_bytes(memory['gpu_memory_bytes'])} beside weights of {_bytes(total)}",
        )
    console.print(grid)


def _engines(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table()
    table.add_column("engine", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what happens; what works instead", ratio=1, overflow="fold")
    for row in rows:
        text = row["text"] + (f" [dim]Instead: {row['instead']}.[/dim]" if row["instead"] else "")
        colour, code = VERDICTS[row["verdict"]], ENGINE_CODES.get(row["verdict"])
        verdict = f"[{colour}]{row['verdict']}[/{colour}]" + (f"\n[dim]{code}[/dim]" if code else "")
        table.add_row(f"{row['version']}\n{row['method']}", verdict, text or "-")
    return table


def _run(console: "Console", run: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("run", "measured", "on")
    for entry in run["measurements"]:
        table.add_row(entry["name"], entry["value"], entry["detail"])
    console.print(table)


def findings_table(findings: list) -> "Table":
    """One row per finding; also for commands that stop at errors."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("finding", no_wrap=True)
    table.add_column("what was seen, why it matters, what to do", ratio=1, overflow="fold")
    for finding in findings:
        colour = COLOURS[finding.severity]
        place = " ".join(part for part in (finding.file, finding.field and f"({finding.field})") if part)
        head = f"[bold]{escape(finding.title)}[/bold]" + (f" [dim]{escape(place)}[/dim]" if place else "")
        body = f"{escape(finding.seen)}\n{escape(finding.why)}\n[green]>[/green] {escape(finding.action)}"
        label = f"[{colour}]{finding.code}\n{finding.severity}[/{colour}]\n{finding.subject}"
        table.add_row(label, f"{head}\n{body}")
    return table


def _bytes(number: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _count(number: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
