"""``hybridspec audit``: does an engine give the same tokens with speculation as without?"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridspec.cli.common import WorkloadOption

if TYPE_CHECKING:
    from hybridspec.engines.audit.server import ServerReport
    from hybridspec.engines.audit.vllm import Finding

HELP = "Does a serving engine stay lossless when it speculates?"
VLLM_HELP = """Runs TARGET in an offline vLLM engine without speculation, then with an oracle that knows the true
continuation and plants wrong tokens, so that every number of accepted tokens from 0 to K occurs: one sequence at a
time, in batches with ragged and empty drafts, across chunked prefill, and with prefix caching. With
--speculative-config it runs that, too, under your engine options as they are.

Tokens are compared with those without speculation. A near tie (two tokens nearly equally likely) is told apart from
corruption by the margin of their log probabilities. Options that are not listed go to vLLM, as of vllm serve. vLLM
runs in a child process of --python, so it need not be installed here. The oracle is a custom_class proposer, which
runs on vLLM's V1 model runner.

Exit status: 0 lossless, 1 corrupt outputs or an engine that dies when it speculates, 2 it could not be told.

Example: hybridspec audit vllm ./Qwen3.5-4B --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'
--python ~/vllm/bin/python --max-model-len 4096 --dtype bfloat16
"""
SERVER_HELP = """Checks a running vLLM server from outside. It generates greedily, one prompt at a time and several
together, then sends every prompt with its output through one prefill, in which nothing is drafted: each token must be
the likeliest there, or a near tie. vLLM cannot be told to stop drafting for one request; --reference names a server of
the same target without speculation to compare with as well. Also shown: acceptance by position from /metrics, and
combinations with a record of silent corruption.

Exit status: 0 lossless as far as that can tell, 1 corrupt outputs, 2 it could not be told (no server, nothing drafted).

Example: hybridspec audit server http://127.0.0.1:8000 --reference http://127.0.0.1:8001
"""
COLOURS = {"equal": "green", "near tie": "yellow", "corrupt": "red", "failed": "red", "not possible": "dim"}
#: Columns of output that is not a terminal.
PLAIN_WIDTH = 140

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.command(
    "vllm",
    help=VLLM_HELP,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def vllm(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Checkpoint folder, as vLLM takes it.", show_default=False)],
    speculative_config: Annotated[
        str | None,
        typer.Option("--speculative-config", help="JSON as of vllm serve: is audited too, and sets K."),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Drafted tokens of the oracle. Default: of the config, or 3.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Only this case of the oracle; repeat for several; none for none of them."),
    ] = None,
    batch: Annotated[int, typer.Option(min=2, help="Sequences together.")] = 4,
    workload: WorkloadOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of a prompt.")] = 192,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated from each prompt.")] = 48,
    near_tie: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest margin of a near tie, in log probability. Default: 0.25 for bfloat16, 0.04 for float16, "
            "0.005 for float32.",
        ),
    ] = None,
    python: Annotated[str | None, typer.Option(help="Python that has vLLM. Default: this one.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take.")] = 1800,
    keep: Annotated[
        Path | None, typer.Option(help="Folder to keep the engines' jobs, answers and logs in.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.engines.audit.engine import Engine
    from hybridspec.engines.audit.vllm import Audit, Prompts

    config = read_config(speculative_config)
    k = k or int((config or {}).get("num_speculative_tokens") or 3)
    texts, prefix = prompt_texts(workload, batch + 1)
    cases = choose_cases(case, k, batch, config is not None)
    with work_folder(keep) as folder, Console(stderr=True).status("starting") as status:
        engine = Engine(python or sys.executable, target, context.args, folder, timeout)
        prompts = Prompts(texts, prefix, prompt_tokens, new_tokens)
        audit = Audit(engine, prompts, k, near_tie, lambda text: status.update(f"vLLM, {text}"))
        findings = audit.run(cases, config)
    bad = any(f.bad for f in findings)
    told = any(f.run != "plain" for f in findings)
    exit_status = 1 if bad else 0 if told else 2
    if as_json:
        answer = {"target": target, "k": k, "near_tie": audit.near_tie, "engine": audit.about}
        answer |= {"findings": [f.to_dict() for f in findings], "exit_status": exit_status}
        json.dump(answer, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(findings, target, audit.about, audit.near_tie)
    raise typer.Exit(exit_status)


@app.command("server", help=SERVER_HELP)
def server(
    url: Annotated[str, typer.Argument(help="Where the server listens.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="As the server calls it. Default: its first.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="URL of a server of the same target without speculation.", show_default=False)
    ] = None,
    workload: WorkloadOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated from each.")] = 64,
    batch: Annotated[int, typer.Option(min=2, help="Requests together.")] = 4,
    near_tie: Annotated[
        float, typer.Option(min=0, help="Largest margin of a near tie, in log probability; 0.25 suits bfloat16.")
    ] = 0.25,
    key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    from rich.console import Console

    from hybridspec.engines.audit.server import Server, audit_server

    texts, _ = prompt_texts(workload, prompts)
    # Long prompts test nothing more here, and a server's context is not known.
    texts = [text[:600] for text in texts]
    with Console(stderr=True).status("connecting") as status:
        main = Server(url, model, key)
        other = Server(reference, model, key) if reference else None
        report = audit_server(main, texts, new_tokens, batch, near_tie, other, report=status.update)
    exit_status = 1 if report.bad else 0 if report.counters.drafts else 2
    if as_json:
        json.dump(report.to_dict() | {"near_tie": near_tie, "exit_status": exit_status}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show_server(report, url)
    raise typer.Exit(exit_status)


def read_config(text: str | None) -> dict[str, Any] | None:
    """The value of ``--speculative-config``.

    Raises:
        InputError: it is no JSON object.
    """
    from hybridspec.errors import InputError

    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"--speculative-config is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"--speculative-config must be a JSON object, not {text}")
    return config


def choose_cases(names: Sequence[str] | None, k: int, batch: int, configured: bool) -> list[Any]:
    from hybridspec.engines.audit.cases import CASE_NAMES, oracle_cases
    from hybridspec.errors import InputError

    cases = oracle_cases(k, batch)
    if not names:
        return cases
    unknown = [name for name in names if name not in (*CASE_NAMES, "none")]
    if unknown:
        raise InputError(f"--case {unknown[0]}: there is none of that name. Choose from {', '.join(CASE_NAMES)}, none.")
    chosen = [case for case in cases if case.name in names]
    if not chosen and not configured:
        raise InputError("--case none without --speculative-config leaves nothing to run")
    return chosen


def prompt_texts(workload: Sequence[str] | None, count: int) -> tuple[list[str], str]:
    """``count`` prompts, taken from all workloads in turn, and a long text."""
    from itertools import chain, zip_longest

    from hybridspec.embedded import workload_files
    from hybridspec.errors import InputError
    from hybridspec.tuning.workloads.sources import find_workload

    sources = workload or list(workload_files())
    loaded = [[prompt.text for prompt in find_workload(source).prompts] for source in sources]
    texts = [text for text in chain.from_iterable(zip_longest(*loaded)) if text]
    unique = list(dict.fromkeys(texts))[:count]
    if len(unique) < 2:
        raise InputError("an audit needs at least two different prompts")
    return unique, max(texts, key=len)


@contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the engines' files; a temporary one stays if an engine failed, for its log."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="hybridspec-audit-"))
    try:
        yield folder
    finally:
        failed = any(
            not job.with_name(job.name.replace(".job.", ".answer.")).exists() for job in folder.glob("*.job.*")
        )
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


def show(findings: "Sequence[Finding]", target: str, about: dict[str, Any], near_tie: float | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    from hybridspec.cli.consoles import table_console

    title = f"{target}: vLLM {about.get('version')}, {about.get('dtype')}" + ", hybrid" * bool(about.get("hybrid"))
    table = Table(title=escape(title))
    for heading in ("case", "run", "result", "tokens", "first divergence", "what occurred"):
        table.add_column(heading, justify="right" if heading == "tokens" else "left")
    for finding in findings:
        comparison = finding.comparison
        worst = comparison.worst if comparison else None
        table.add_row(
            finding.case,
            escape(finding.run),
            f"[{COLOURS[finding.status]}]{finding.status}[/]",
            f"{comparison.compared:,}" if comparison else "",
            escape(finding.error or str(worst or "")),
            occurred(finding),
        )
    out = table_console(PLAIN_WIDTH)
    out.print(table)
    out.print(
        "plain: without speculation, compared with the first plain run. oracle: compared with the plain run above."
    )
    out.print(f"A divergence with a margin of at most {near_tie:g} in log probability is a near tie.")


def occurred(finding: "Finding") -> str:
    """Coverage of an oracle, or acceptance of a real draft."""
    coverage, acceptance = finding.coverage, finding.acceptance
    if coverage is not None:
        counts = " ".join(f"{n}:{count}" for n, count in coverage.accepted.items())
        parts = [f"accepted {counts or 'none'}", f"{coverage.empty} empty, {coverage.ragged} ragged"]
        if coverage.missing:
            parts.append(f"never accepted {', '.join(map(str, coverage.missing))}")
        if coverage.lost:
            parts.append(f"{coverage.lost} after a divergence")
        return "; ".join(parts)
    if acceptance:
        drafted, accepted = acceptance.get("draft_tokens", 0), acceptance.get("accepted_tokens", 0)
        return f"{accepted:g} of {drafted:g} drafted tokens accepted"
    return ""


def show_server(report: "ServerReport", url: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from hybridspec.cli.consoles import table_console

    table = Table(title=escape(f"{url}: {report.model}, vLLM {report.version or 'of unknown version'}"))
    for heading in ("check", "result", "tokens", "largest margin"):
        table.add_column(heading, justify="right" if heading == "tokens" else "left")
    for finding in report.findings:
        comparison = finding.comparison
        status = comparison.status
        table.add_row(
            finding.check, f"[{COLOURS[status]}]{status}[/]", f"{comparison.compared:,}", str(comparison.worst or "")
        )
    out = table_console(PLAIN_WIDTH)
    out.print(table)
    acceptance = report.counters.to_dict()
    shares = " ".join(f"{share:.0%}" for share in acceptance["acceptance_by_position"])
    out.print(
        f"accepted {acceptance['accepted_tokens']} of {acceptance['draft_tokens']} drafted tokens in "
        f"{acceptance['drafts']} drafts; by position: {shares or 'unknown'}"
    )
    for warning in report.warnings:
        out.print(f"[yellow]warning:[/] {escape(warning)}")
