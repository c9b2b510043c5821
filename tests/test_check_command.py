"""``hybridspec check`` and ``explain`` as a user types them, and the check before other commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridspec
from hybridspec.checkpoints.codes import CODES
from hybridspec.embedded import DRAFTS, TARGET
from hybridspec.tuning.model_checks import cosines, repetition, run_models
from tests.checkpoints import edit
from tests.test_cli import run

DRAFT = DRAFTS["draft-2-layers"]


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a few tokens."""
    monkeypatch.setattr("hybridspec.tuning.model_checks.NEW_TOKENS", 12)


@pytest.fixture
def permuted(tmp_path: Path) -> Path:
    """The embedded draft with two tokens swapped."""
    folder = tmp_path / "permuted"
    shutil.copytree(DRAFT, folder)

    def swap(tokenizer: dict) -> None:
        table = tokenizer["model"]["vocab"]
        table["a"], table["b"] = table["b"], table["a"]

    edit("tokenizer.json", swap)(folder)
    return folder


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """The embedded target with a config of another model."""
    folder = tmp_path / "lost"
    shutil.copytree(TARGET, folder)
    edit("config.json", lambda c: c.update(layer_types=["full_attention"] * 24))(folder)
    return folder


def test_the_embedded_pair_is_clean(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert "6 x (3 linear_attention + 1 full_attention)" in out and "OK: no errors" in out
    for name, draft in DRAFTS.items():
        report = hybridspec.check(TARGET, draft)
        assert not report.errors + report.warnings, name


def test_findings_in_a_table_and_in_json(capsys: pytest.CaptureFixture, permuted: Path) -> None:
    status, out, _ = run(capsys, "check", str(TARGET), str(permuted))
    assert status == 1
    assert "HS301" in out and "1 error" in out and "not the target's" in out
    status, out, _ = run(capsys, "check", str(TARGET), str(permuted), "--json")
    assert status == 1
    report = json.loads(out)
    assert report["exit_status"] == 1 and report["format_version"] == 1
    error = report["findings"][0]
    assert (error["code"], error["severity"], error["subject"]) == ("HS301", "error", "pair")
    assert {"seen", "why", "action", "title", "file", "field"} <= error.keys()
    against = report["draft"]["tokenizer"]["against_target"]
    assert against["same"] is False and 0 < against["probes_differing"] <= against["probes"]


def test_layers_one_per_line_with_the_first_difference(capsys: pytest.CaptureFixture, lost: Path) -> None:
    status, out, _ = run(capsys, "check", str(lost), "--layers")
    assert status == 1
    assert "HS101" in out
    assert "First difference: layer 0" in hybridspec.check(lost).errors[0].seen
    rows = [line.split() for line in out.splitlines() if line.split() and line.split()[0].isdigit()]
    marked = [int(row[0]) for row in rows if row[-1] == "differs"]
    assert marked == [index for index in range(24) if index % 4 != 3]


def test_strict_makes_warnings_count(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(DRAFT, folder)
    edit("generation_config.json", lambda c: c.update(eos_token_id=[0, 1]))(folder)
    assert run(capsys, "check", str(TARGET), str(folder))[0] == 0
    assert run(capsys, "check", str(TARGET), str(folder), "--strict")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("/nowhere",), 2, "/nowhere: no such folder"),
        ((str(TARGET), "--engine", "abacus"), 2, "unknown engine 'abacus'"),
        ((str(TARGET), "--gpu-memory", "-3"), 2, "gpu_memory"),
        ((str(TARGET), "--compile"), 2, "--compile needs --run"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture, arguments: tuple[str, ...], status: int, words: str) -> None:
    code, out, err = run(capsys, "check", *arguments)
    assert code == status
    assert words in out + err and "Traceback" not in out + err


def test_memory_and_engine_options(capsys: pytest.CaptureFixture) -> None:
    arguments = ("check", str(TARGET), str(DRAFT), "--gpu-memory", "1", "--engine", "vllm", "--k", "3", "--json")
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    report = json.loads(out)
    assert report["memory"]["slot_factor"] == 4 and report["memory"]["sequences"]["plain"] > 0
    assert [f["code"] for f in report["findings"] if f["severity"] == "warning"] == ["HS603"]


@pytest.mark.parametrize("command", ["tune", "generate"])
def test_other_commands_stop_at_errors(
    capsys: pytest.CaptureFixture, permuted: Path, tmp_path: Path, command: str
) -> None:
    arguments = [command, "--target", str(TARGET), "--draft", str(permuted)]
    arguments += ["--prompt", "x"] if command == "generate" else ["--out", str(tmp_path / "out")]
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "HS301" in err and "--no-check" in err and "Traceback" not in err


def test_no_check_goes_on(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """A tokenizer whose merges differ is an error of the check, and runs."""
    folder = tmp_path / "copy"
    shutil.copytree(DRAFT, folder)
    edit("tokenizer.json", lambda t: t["model"]["merges"].reverse())(folder)
    arguments = ("generate", "--prompt", "x", "--target", str(TARGET), "--draft", str(folder), "--max-new-tokens", "3")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "HS304" in err
    assert run(capsys, *arguments, "--no-check")[0] == 0


def test_explain(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, "explain", "hs101")
    assert status == 0 and "HS101: config and tensors give different layer sequences" in out and "What to do" in out
    status, out, _ = run(capsys, "explain")
    assert status == 0 and all(code in out for code in CODES)
    status, out, _ = run(capsys, "explain", "HS101", "--json")
    assert json.loads(out)["HS101"]["severity"] == "error"
    status, _, err = run(capsys, "explain", "HS110X")
    assert status == 2 and "HS110" in err


def test_codes_are_whole() -> None:
    for name, code in CODES.items():
        assert name.startswith("HS") and len(name) == 5
        for text in (code.title, code.why, code.action, code.long):
            assert text and text == text.strip()
        assert code.why.endswith(".") and code.long.endswith(".") and not code.title.endswith(".")


def test_help_has_an_example_and_nothing_heavy_is_imported() -> None:
    code = "import sys; import hybridspec.cli.check, hybridspec.cli.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("short_runs")
def test_run_measures_a_model_that_drafts_for_itself() -> None:
    """Which must be always right."""
    run_facts, findings = run_models(DRAFT, DRAFT, length=96)
    rows = {row["name"]: row for row in run_facts["measurements"]}
    for subject in ("target", "draft"):
        for text in ("short", "long"):
            assert rows[f"{subject}: cached against full, {text}"]["number"] > 0.9999
        assert rows[f"{subject}: end of a long prompt"]["value"] == "kept"
        assert 0 <= rows[f"{subject}: repetition"]["number"] <= 1
    assert rows["pair: acceptance"]["number"] == 1
    assert not {f.code for f in findings} - {"HS702"}


@pytest.mark.usefixtures("short_runs")
def test_run_finds_a_model_that_decodes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that does nothing keeps rejected tokens in the state."""
    from hybridspec.runtime.session import Session

    monkeypatch.setattr("hybridspec.runtime.runner.check_rollback", lambda runner: None)
    commit = Session.commit
    monkeypatch.setattr(Session, "commit", lambda self, keep: commit(self, self.cache.pending))
    _, findings = run_models(DRAFT, None, length=64)
    assert "HS701" in {f.code for f in findings if f.severity == "error"}


@pytest.mark.slow
def test_run_compiles(capsys: pytest.CaptureFixture) -> None:
    run_facts, findings = run_models(DRAFT, None, length=32, compiled=True)
    row = next(row for row in run_facts["measurements"] if "compiled" in row["name"])
    assert row["number"] is None or row["number"] > 0.9999
    assert "HS706" not in {f.code for f in findings}


@pytest.mark.usefixtures("short_runs")
def test_run_says_what_cannot_be_loaded(tmp_path: Path) -> None:
    _, findings = run_models(DRAFT, tmp_path, length=32)
    failed = [f for f in findings if f.code == "HS705"]
    assert len(failed) == 1 and failed[0].subject == "draft" and "config.json is missing" in failed[0].seen


def test_repetition_and_cosines() -> None:
    import torch

    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([7] * 10) == pytest.approx(0.9)
    assert repetition([1, 2, 3] * 5) > 0.5
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [float("nan"), 1.0]])
    other = torch.tensor([[2.0, 0.0], [1.0, -1.0], [1.0, 1.0]])
    assert cosines(rows, other).tolist() == pytest.approx([1.0, 0.0, 0.0])
