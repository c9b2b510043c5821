"""Runs the blocks of a document as they are printed."""

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.mathtext import MathTextParser

from hybridspec.cli import app as cli
from hybridspec.errors import InputError
from hybridspec.hooks import adapters
from hybridspec.tuning.config_file import load_config
from tests.document_commands import check_block, commands
from tests.documents import ROOT, Block, Document, DocumentError

EXAMPLES = ROOT / "docs" / "examples"


def run_document(document: Document, folder: Path, config: pytest.Config) -> None:
    """Runs in ``folder`` and in this process what is not marked otherwise, and checks all the rest.

    Raises:
        DocumentError: a block does not do what the document says; names it.
    """
    names: dict[str, object] = {}
    output = ""
    with at_home(folder):
        for block in document.blocks:
            runs = block.mark in ("", "continues", "exit")
            if block.mark == "file":
                # As if it was installed: a document says how, in a block that is slow.
                sys.path.insert(0, str(write(block, folder).parent))
            elif block.language == "python" and runs:
                if block.mark != "continues":
                    names = {"__name__": "__main__"}
                output = run_python(block, names)
            elif block.language == "python":
                check_python_text(block)
            elif block.language == "sh" and runs:
                output = run_commands(block)
            elif block.language == "sh":
                check_block(block, folder, config)
            elif block.mark == "output":
                compare(block, output)
            else:
                check_data(block, folder)


@contextlib.contextmanager
def at_home(folder: Path) -> Iterator[None]:
    """Works in ``folder``; what blocks import from there, and recurrences that they register, is forgotten after."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), str(EXAMPLES), *sys.path])
        patch.setattr(adapters, "RECURRENCES", dict(adapters.RECURRENCES))
        patch.setattr(adapters, "MODULES", set(adapters.MODULES))
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file and (Path(file).is_relative_to(folder) or Path(file).parent == EXAMPLES):
                    del sys.modules[name]


def write(block: Block, folder: Path) -> Path:
    path = folder / block.argument
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")
    return path


def run_python(block: Block, names: dict[str, object]) -> str:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, block.place, "exec"), names)
    except Exception as error:
        raise DocumentError(f"{block.place}: {traceback.format_exc(limit=-1)}") from error
    return printed.getvalue()


def check_python_text(block: Block) -> None:
    """Its syntax, and what it imports from this project."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        raise DocumentError(f"{block.place}: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "hybridspec":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    raise DocumentError(f"{block.place}: {node.module} has no {alias.name}")


def run_commands(block: Block) -> str:
    """Commands of ours, in this process."""
    printed = ""
    wanted = int(block.argument) if block.mark == "exit" else 0
    for program, *arguments in commands(block):
        if program != "hybridspec":
            raise DocumentError(f"{block.place}: {program} does not run in every test: mark the block slow or parse")
        status, out, err = run_hybridspec(arguments)
        if status != wanted:
            line = shlex.join([program, *arguments])
            raise DocumentError(f"{block.place}: {line}: exit status {status}, not {wanted}: {err[-2000:]}")
        printed += out
    return printed


def run_hybridspec(arguments: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["hybridspec", *arguments])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def compare(block: Block, output: str) -> None:
    same = doctest.OutputChecker().check_output(
        block.text, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.DONT_ACCEPT_TRUE_FOR_1
    )
    if not same:
        raise DocumentError(f"{block.place}: the block before printed:\n{output}")


def check_data(block: Block, folder: Path) -> None:
    """Settings and data can be read, formulas are well formed."""
    try:
        if block.language == "toml":
            path = folder / "block.toml"
            path.write_text(block.text)
            load_config(path)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "jsonl":
            for line in block.text.splitlines():
                json.loads(line)
        elif block.language == "math":
            for line in filter(None, map(str.strip, block.text.split("\\\\"))):
                MathTextParser("path").parse(f"${' '.join(line.split())}$")
    except (InputError, ValueError) as error:
        raise DocumentError(f"{block.place}: {error}") from error


def script(document: Document) -> list[tuple[Block, str]]:
    """What a reader with time types: blocks that run or are slow, each with the whole program that it is part of."""
    found: list[tuple[Block, str]] = []
    program = ""
    for block in document.blocks:
        if block.mark == "file":
            found.append((block, ""))
        elif block.language == "sh" and block.mark != "parse":
            found.append((block, block.text))
        elif block.language == "python" and block.mark != "parse":
            program = program + block.text if block.mark == "continues" else block.text
            found.append((block, program))
    return found


def run_outside(block: Block, program: str, folder: Path, environment: dict[str, str]) -> None:
    """One block in processes of its own."""
    if block.mark == "file":
        write(block, folder)
        return
    line = ["python", "-c", program] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", program]
    done = subprocess.run(line, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=3600)
    if done.returncode != (int(block.argument) if block.mark == "exit" else 0):
        raise DocumentError(
            f"{block.place}: exit status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
