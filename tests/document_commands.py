"""Commands in documents, checked against the options that they really take, without running them."""

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from hybridspec.cli.app import app
from hybridspec.drafts.registry import make_length
from hybridspec.engines.export.key_sets import choose_key_set
from hybridspec.errors import HybridspecError
from hybridspec.specs import STRATEGIES, draft_spec
from hybridspec.tuning.config_file import load_config, tomllib
from hybridspec.tuning.workloads.sources import WorkloadSource
from tests.documents import ROOT, Block, DocumentError

#: What the parser of the command line raises; typer brings its own click in newer versions.
UsageProblem = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
#: Ends a command, or sends its output somewhere.
JOINTS = ("&&", ";", "|", "||")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split, words.commenters = True, "#"
        found += split(list(words))
    if not found:
        raise DocumentError(f"{block.place}: no command in it")
    return found


def split(words: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    rest = iter(words)
    for word in rest:
        if word in JOINTS:
            parts.append([])
        elif word in (">", ">>", "<"):
            next(rest)
        elif parts[-1] or not ASSIGNMENT.fullmatch(word):
            parts[-1].append(word)
    return [part for part in parts if part]


def check_block(block: Block, folder: Path, config: pytest.Config) -> None:
    """Raises :class:`DocumentError` unless every command of the block, run in ``folder``, would take its options."""
    for program, *arguments in commands(block):
        try:
            check_command(program, arguments, folder, config)
        except (HybridspecError, UsageProblem, pytest.UsageError, DocumentError) as error:
            message = error.format_message() if isinstance(error, UsageProblem) else error
            raise DocumentError(f"{block.place}: {shlex.join([program, *arguments])}: {message}") from error


def check_command(program: str, arguments: list[str], folder: Path, config: pytest.Config) -> None:
    name = Path(program).name
    if name in ("python", "python3"):
        check_python(arguments, config)
    elif "/" in program:
        script = ROOT / program
        if not script.is_file() or not os.access(script, os.X_OK):
            raise DocumentError("no such script, or it may not be executed")
    elif program == "torchrun":
        check_python(arguments[arguments.index("-m") :], config)
    elif program in CHECKS:
        CHECKS[program](arguments, folder, config)
    else:
        raise DocumentError(f"{program!r} is no command whose options can be checked")


def parsed(arguments: Sequence[str]) -> Any | None:
    """The context of the command that is named, without running it; None where it only shows something (--help)."""
    command, name, context, rest = typer.main.get_command(app), "hybridspec", None, list(arguments)
    try:
        while True:
            context = command.make_context(name, rest, parent=context)
            if not hasattr(command, "resolve_command"):
                return context
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            name, command, rest = command.resolve_command(context, rest)
    except typer.Exit:
        return None


def check_hybridspec(arguments: Sequence[str], folder: Path, config: pytest.Config) -> None:
    """Options by the real parser, then what they say: drafts, rules, workloads, files of settings, vLLM's own keys."""
    context = parsed(arguments)
    if context is None:
        return
    values = context.params
    # Some commands take a folder for a draft, others a strategy.
    for draft in as_list(values.get("draft")):
        if isinstance(draft, str):
            check_draft(draft)
    if context.info_name in ("tune", "compare", "generate", "vllm") and not isinstance(values.get("length"), int):
        for rule in [*as_list(values.get("length")), *as_list(values.get("k"))]:
            if rule != "fixed":
                make_length(rule)
    for workload in as_list(values.get("workload")):
        WorkloadSource.parse(workload)
    if values.get("config"):
        load_config(folder / values["config"])
    keys = choose_key_set("0.33.0")[0]
    for word in context.args:
        known = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and known not in keys.engine_arguments:
            raise DocumentError(f"{word} is no option, and no engine argument of vLLM either")
    for key in json.loads(values.get("speculative_config") or "{}"):
        if key not in keys.speculative_keys:
            raise DocumentError(f"{key!r} is no key of --speculative-config")


def check_draft(spec: str) -> None:
    name, _, options = draft_spec(spec).partition(":")
    # A strategy that a document has just defined is known only where its package is installed.
    if name in STRATEGIES.names():
        STRATEGIES.options(name, options, STRATEGIES.find(name).create)
    elif not name.startswith("my-"):
        raise STRATEGIES.unknown(name)


def as_list(value: object) -> list:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


class Parsed(Exception):
    """Raised in place of what comes after the options."""


def check_python(arguments: list[str], config: pytest.Config) -> None:
    """A script or module: it is there and, if it is ours, takes these options."""
    if arguments[:1] == ["-m"]:
        name, *rest = arguments[1:]
        if name == "pytest":
            check_pytest(rest, ROOT, config)
        elif importlib.util.find_spec(name) is None:
            raise DocumentError(f"no module {name}")
        elif name.split(".")[0] in ("hybridspec", "benchmarks"):
            check_options(lambda: runpy.run_module(name, run_name="__main__"), name, rest)
        return
    script = ROOT / arguments[0]
    if not script.is_file():
        raise DocumentError(f"no such script: {arguments[0]}")
    check_options(lambda: runpy.run_path(str(script), run_name="__main__"), str(script), arguments[1:])


def check_options(run: Callable[[], object], name: str, arguments: list[str]) -> None:
    """Starts a program, and stops it when it has read its options."""
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: object, **options: object) -> None:
        original(self, *given, **options)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            run()
        except Parsed:
            return
        except SystemExit as ended:
            raise DocumentError("these options are refused") from ended
    raise DocumentError("it reads no options")


def check_pip(arguments: list[str], folder: Path, config: pytest.Config) -> None:
    """Folders that are installed, and their extras."""
    if arguments[:1] != ["install"]:
        raise DocumentError("only pip install is known here")
    for word in arguments[1:]:
        place = re.fullmatch(r"(\.[\w./-]*)(?:\[([\w,]+)\])?", word)
        if not place:
            continue
        file = (ROOT if place[1] == "." else folder / place[1]) / "pyproject.toml"
        if not file.is_file():
            raise DocumentError(f"{place[1]} has no pyproject.toml")
        extras = tomllib.loads(file.read_text())["project"].get("optional-dependencies", {})
        if unknown := set(filter(None, (place[2] or "").split(","))) - extras.keys():
            raise DocumentError(f"no such extra: {', '.join(unknown)}")


def check_pytest(arguments: list[str], folder: Path, config: pytest.Config) -> None:
    """Options by pytest's own parser; files and markers that exist."""
    options = config._parser.parse(arguments)
    for name in options.file_or_dir:
        if not (ROOT / name.partition("::")[0]).exists():
            raise DocumentError(f"no such test file: {name}")
    markers = {line.partition(":")[0] for line in config.getini("markers")}
    words = set(re.findall(r"\w+", options.markexpr or "")) - {"not", "and", "or"}
    if unknown := words - markers:
        raise DocumentError(f"no such marker: {', '.join(unknown)}")


def check_ruff(arguments: list[str], folder: Path, config: pytest.Config) -> None:
    if arguments[:1] not in (["check"], ["format"]):
        raise DocumentError("only ruff check and ruff format are known here")


#: Program -> what checks its arguments.
CHECKS: dict[str, Callable] = {
    "hybridspec": check_hybridspec,
    "pip": check_pip,
    "pytest": check_pytest,
    "ruff": check_ruff,
}


def options() -> Iterator[tuple[str, str]]:
    """Every command of the command line, and every option of it, as ``(command, option)``."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield name, max(parameter.opts, key=len)
        for sub, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {sub}")

    yield from walk(typer.main.get_command(app), "hybridspec")
