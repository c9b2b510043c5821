"""The command line as a user types it, in this process: outputs, exit statuses, and what bad input is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridspec.cli import app as cli
from hybridspec.embedded import TARGET


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hybridspec", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


SMALL = ("-w", "json", "--prompts", "1", "--max-new-tokens", "8", "--max-k", "2", "--trials", "3")


def test_tune_writes_a_profile_and_resumes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "tune", *SMALL, "--out", str(tmp_path), "--json")
    assert status == 0
    profile = json.loads(out)
    assert profile == json.loads((tmp_path / "profile.json").read_text())
    workload = profile["workloads"]["json"]
    assert workload["complete"]
    assert workload["best_k"] in (0, 1, 2)
    assert sorted(workload["measured"]) == ["0", "1", "2"]
    assert (tmp_path / "speculative-config-json.json").exists() == bool(workload["best_k"])
    status, out, _ = run(capsys, "tune", *SMALL, "--out", str(tmp_path), "--json")
    assert status == 0
    assert json.loads(out)["workloads"] == profile["workloads"]
    status, out, _ = run(capsys, "tune", *SMALL, "--out", str(tmp_path))
    assert status == 0
    assert "best K" in out and "json" in out and "profile.json" in out


def test_generate_compare_says_the_text_is_the_same(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(
        capsys, "generate", "--prompt", "def add(a, b):", "--k", "3", "--max-new-tokens", "16", "--compare"
    )
    assert status == 0
    assert "Same text: yes" in out


def test_generate_json(capsys: pytest.CaptureFixture) -> None:
    arguments = ("generate", "--prompt", "Once", "--k", "2", "--max-new-tokens", "12", "--temperature", "0.8", "--json")
    status, first, _ = run(capsys, *arguments, "--seed", "3")
    assert status == 0
    result = json.loads(first)["speculative"]
    assert len(result["tokens"]) == len(result["origins"]) <= 12
    again = json.loads(run(capsys, *arguments, "--seed", "3")[1])["speculative"]
    other = json.loads(run(capsys, *arguments, "--seed", "4")[1])["speculative"]
    assert again["tokens"] == result["tokens"] != other["tokens"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate", "--prompt", "  "), "prompt is empty"),
        (("generate", "--prompt", "x", "--k", "9000"), "K = 9000 is beyond the context"),
        (("generate", "--prompt", "x", "--max-new-tokens", "9000"), "exceed the context"),
        (("generate", "--prompt", "x", "--target", "/nowhere", "--draft", "/nowhere"), "/nowhere: no such folder"),
        (("generate", "--prompt", "x", "--target", "/nowhere"), "--target needs --draft"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "--prompt", "x", "--top-p", "1.5"), "top-p"),
        (("generate", "--prompt", "x", "--rollback", "magic"), "magic"),
        (("tune", "-w", "nothing"), "no embedded workload 'nothing'"),
        (("tune", "-w", "json", "--max-k", "9000"), "workload json, prompt"),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    extra = ("--out", str(tmp_path)) if arguments[0] == "tune" else ()
    status, _, err = run(capsys, *arguments, *extra)
    assert status == 2
    assert expected in err
    assert "Traceback" not in err


def test_malformed_workload_line_is_named(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "ok"}\n{"prompt": oops}\n')
    status, _, err = run(capsys, "tune", "-w", str(path), "--out", str(tmp_path / "out"))
    assert status == 2
    assert f"{path}, line 2" in err


def test_missing_weights_are_named(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    status, _, err = run(capsys, "generate", "--prompt", "x", "--target", str(tmp_path), "--draft", str(TARGET))
    assert status == 2
    assert f"{tmp_path}: no weights" in err


def test_help_shows_an_example_and_imports_stay_light() -> None:
    code = "import sys; import hybridspec.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for command in ("tune", "generate"):
        out = subprocess.run(
            [sys.executable, "-m", "hybridspec.cli.app", command, "--help"], capture_output=True, text=True, check=True
        )
        assert f"Example: hybridspec {command}" in out.stdout
