"""The directions of imports, as pyproject.toml has them: import-linter checks them, and finds one that is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json", "*.jsonl")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The package as it is installed: ``drafts`` and ``tuning`` inside of it, where import-linter looks for them."""
    shutil.copytree(ROOT / "hybridspec", tmp_path / "hybridspec", ignore=IGNORED)
    for name in ("drafts", "tuning"):
        shutil.copytree(ROOT / name, tmp_path / "hybridspec" / name, ignore=IGNORED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command as command; sys.exit(command())"
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True
    )


def test_imports_point_one_way(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("recurrence/tape.py", "from hybridspec.state import cache"),
        ("decoding/loop.py", "from hybridspec.drafts import registry"),
        ("checkpoints/files.py", "import torch"),
        ("checker/check.py", "from hybridspec.runtime import runner"),
        ("drafts/registry.py", "from hybridspec.drafts.embedded_pair import corpus"),
    ],
)
def test_a_wrong_import_is_found(tree: Path, module: str, line: str) -> None:
    path = tree / "hybridspec" / module
    path.write_text(f"{path.read_text()}\n\n{line}\n")
    result = lint(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 broken" in result.stdout or "2 broken" in result.stdout
