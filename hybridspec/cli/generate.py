"""``hybridspec generate``: text from a target with a draft, and the two ways side by side."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hybridspec.cli.common import (
    CompileOption,
    NoCheckOption,
    PackedOption,
    RollbackOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    check_first,
)

if TYPE_CHECKING:
    from rich.console import Console

HELP = """Generates text by speculative decoding; accepted draft tokens are shown in colour on a terminal.

--compare decodes plainly as well and reports whether the text is the same (it must be, when greedy), both times and
the acceptance. Exit status 1 says that it was not the same.

Example: hybridspec generate --prompt "def fibonacci(n):" --k 4 --compare
"""


def generate(
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from standard input.")],
    target: TargetOption = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            help="Checkpoint folder of the draft, or a draft strategy. Default: the embedded one.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        str,
        typer.Option("--k", "--length", "-l", help="Draft length, or a rule such as svip; 0 is plain decoding."),
    ] = "4",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too, and compare.")] = False,
    threads: ThreadsOption = 1,
    rollback: RollbackOption = "auto",
    compiled: CompileOption = False,
    packed: PackedOption = False,
    no_check: NoCheckOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec import embedded
    from hybridspec.cli.common import load_target
    from hybridspec.cli.consoles import table_console
    from hybridspec.decoding.loop import check_length
    from hybridspec.decoding.sampling import Sampling
    from hybridspec.drafts.registry import make_draft, make_length
    from hybridspec.errors import InputError
    from hybridspec.runtime.compile_ahead import compile_ahead

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InputError("the prompt is empty: give some text to --prompt")
    sampling = Sampling(temperature, top_k, top_p)
    rule = make_length(k)
    if draft == "":
        raise InputError("--draft is empty: give a folder or a strategy")
    if target is not None and draft is None and rule.longest:
        raise InputError("--target needs --draft: the embedded draft fits the embedded target only")
    with Console(stderr=True).status("loading target and draft") as status:
        check_first(target, [draft] if draft and rule.longest else [], no_check)
        runner = load_target(target, threads, rollback, compiled, packed)
        strategy = make_draft(draft or f"same-architecture:{embedded.DEFAULT_DRAFT}", runner) if rule.longest else None
        tokens = runner.encode(text)
        check_length(runner, tokens, max_new_tokens, rule.demanded)
        compile_ahead(runner, [strategy], rule.longest, status.update)
    console = table_console(120)
    runs = {}
    ways = {"speculative": rule} if rule.longest else {"plain": rule}
    for name, length in {"plain": make_length(0), **ways}.items() if compare else ways.items():
        if not as_json and compare:
            console.print(f"[bold]{name} ({length.name})[/bold]")
        shown = None if as_json else console
        runs[name] = _run(runner, strategy, tokens, length, max_new_tokens, sampling, seed, shown)
    compare = compare and len(runs) > 1
    same = runs["plain"]["tokens"] == runs["speculative"]["tokens"] if compare else None
    if as_json:
        json.dump(
            {"prompt": text, "k": int(k) if k.isdecimal() else k, "same_output": same, **runs}, sys.stdout, indent=2
        )
        sys.stdout.write("\n")
    else:
        _summary(console, runs, same, sampling)
    if compare and sampling.greedy and not same:
        raise typer.Exit(1)


def _run(runner, draft, tokens, length, max_new_tokens, sampling, seed, console) -> dict:
    import torch

    from hybridspec.decoding.loop import decode
    from hybridspec.decoding.step import Statistics

    statistics, ids, origins = Statistics(), [], []
    generator = torch.Generator().manual_seed(seed)
    begun = time.perf_counter()
    shown = ""
    for token in decode(
        runner,
        tokens,
        draft=draft,
        k=length,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generator=generator,
        statistics=statistics,
    ):
        ids.append(token.id)
        origins.append(token.origin)
        if console is not None:
            text = runner.tokenizer.decode(ids, skip_special_tokens=True)
            # A character may span tokens: what ends in the replacement character waits for its rest.
            if not text.endswith("\ufffd"):
                style = "green" if token.origin == "draft" else None
                console.print(text[len(shown) :], end="", style=style, markup=False, soft_wrap=True)
                shown = text
    seconds = time.perf_counter() - begun
    if console is not None:
        console.print()
    return {
        "text": runner.tokenizer.decode(ids, skip_special_tokens=True),
        "tokens": ids,
        "origins": origins,
        "seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
        "acceptance_rate": statistics.acceptance_rate,
        "acceptance_length": statistics.acceptance_length,
        "acceptance_by_position": statistics.acceptance_by_position(),
    }


def _summary(console: "Console", runs: dict, same: bool | None, sampling: object) -> None:
    from rich.table import Table

    table = Table()
    for heading in ("", "tokens", "seconds", "tokens per second", "acceptance rate", "acceptance length"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, run in runs.items():
        rate = run["acceptance_rate"]
        table.add_row(
            name,
            str(len(run["tokens"])),
            f"{run['seconds']:.2f}",
            f"{run['tokens_per_second']:.1f}",
            "-" if rate is None else f"{rate:.0%}",
            f"{run['acceptance_length']:.2f}",
        )
    console.print(table)
    if same is None:
        return
    if sampling.greedy:
        console.print("Same text: yes" if same else "[red]Same text: no. This is a bug; please report it.[/red]")
    else:
        console.print("Sampling: both texts follow the target's distribution; the random numbers are used differently.")
    console.print(f"Speed-up: {runs['plain']['seconds'] / runs['speculative']['seconds']:.2f}")
