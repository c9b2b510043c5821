"""What tests of reports share: the command, profiles as files, tables as text."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hybridspec.cli import app as cli
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_records import WorkloadProfile
from tests.profiles import unmeasured, workload

EIGHT = {f"workload-{i}": workload(1.1 + 0.1 * i) for i in range(5)} | {
    "plain": workload(0.8),
    "unmeasured": unmeasured(),
    "surveyed": workload(None),
}


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hybridspec", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def typed(row: dict) -> WorkloadProfile:
    return WorkloadProfile.model_validate(row)


def saved(folder: Path, content: Profile) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "profile.json"
    path.write_text(json.dumps(content.to_dict()))
    return path


def printed(table: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
