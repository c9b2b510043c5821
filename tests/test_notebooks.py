"""The notebooks run, and what is committed is a clean run of the full setting."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_the_fast_setting(runner: ModuleType, path: Path) -> None:
    notebook = runner.run(path, fast=True)
    assert "**fast**" in json.dumps(notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_a_clean_run_of_the_full_setting(runner: ModuleType, path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [problem for cell in code if (problem := runner.unwanted(cell))]
    assert "**full**" in json.dumps(notebook.cells)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert path.stat().st_size < 500_000
    assert re.match(r"# \w.*\n\n\*\*What you learn\.\*\* ", notebook.cells[0].source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_public_names_only(path: Path) -> None:
    source = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    assert not re.findall(r"\bimport _\w+|\.(_[a-z]\w*)", source)


def write(path: Path, *cells: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return path


def test_a_cell_that_fails_is_named(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "broken.ipynb", "x = 0", "# a comment\n1 / x")
    before = path.read_bytes()
    with pytest.raises(runner.NotebookError, match=r"broken\.ipynb, code cell 2 of 2 \(# a comment\)") as failure:
        runner.run(path, fast=True)
    assert "ZeroDivisionError: division by zero" in str(failure.value)
    assert "\x1b" not in str(failure.value)
    assert path.read_bytes() == before


def test_outputs_say_nothing_of_the_machine(runner: ModuleType, tmp_path: Path) -> None:
    source = (
        "import pathlib, sys, tempfile\nprint(tempfile.mkdtemp() + '/model', pathlib.Path.home() / 'x')\n"
        f"print({str(FOLDER / 'run.py')!r})"
    )
    notebook = runner.run(write(tmp_path / "paths.ipynb", source), fast=True)
    assert notebook.cells[0].outputs[0].text == "work/model ~/x\nnotebooks/run.py\n"
    assert notebook.cells[0].metadata == {}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("stream", text="reading /opt/models/x\n"), "a path of this machine: /opt/models/x"),
        (nbformat.v4.new_output("display_data", {"text/html": "<td>/home/me/x</td>"}), "/home/me/x"),
        (nbformat.v4.new_output("stream", name="stderr", text="UserWarning: !"), "standard error: UserWarning: !"),
        (nbformat.v4.new_output("error", ename="ValueError", evalue="no"), "ValueError: no"),
        (nbformat.v4.new_output("stream", text="https://example.org/home/x, a/tmp/b, 1/opt\n"), None),
    ],
)
def test_what_no_reader_should_meet(runner: ModuleType, output: nbformat.NotebookNode, problem: str | None) -> None:
    found = runner.unwanted(nbformat.v4.new_code_cell(outputs=[output]))
    assert found is None if problem is None else problem in found


def test_an_unknown_name_is_refused(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.main(["05"])
    assert stop.value.code == 2
    assert "no notebook '05': choose 01_comparing_drafts" in capsys.readouterr().err
