"""A stand-in for vLLM's package, with a clock of its own: what our child process needs of it, and nothing of a model.

:func:`install` lays it into a folder and writes an interpreter that finds it there.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent


def install(folder: Path, version: str = "0.33.0", distribution: str = "vllm") -> str:
    """Path of an interpreter that has nothing but this vLLM. It writes a line into ``folder/engines.txt`` for each
    engine that starts.
    """
    packages = folder / "packages"
    shutil.copytree(HERE / "vllm", packages / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    python = folder / "python"
    log = folder / "engines.txt"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{packages}:$PYTHONPATH" FAKE_VLLM_LOG="{log}"\nexec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def started(python: str) -> int:
    """How many engines were started with an interpreter of :func:`install`."""
    log = Path(python).parent / "engines.txt"
    return len(log.read_text().splitlines()) if log.exists() else 0
