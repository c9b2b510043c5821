"""The command line as a user types it, in this process: outputs, exit statuses, and what bad input is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridspec.cli import app as cli
from hybridspec.embedded import TARGET
from hybridspec.tuning.profile import Profile
from tests.checkpoints import write_checkpoint


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
    arguments = ("tune", *SMALL, "-d", "prompt-lookup", "-l", "fixed", "--out", str(tmp_path))
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    profile = json.loads(out)
    assert profile == Profile.load(tmp_path).to_dict()
    workload = profile["workloads"]["json"]
    assert workload["complete"] and workload["stopped"]
    assert workload["chosen"]["draft"] in ("", "prompt-lookup")
    assert {(row["draft"], row["length"]) for row in workload["predicted"]} == {
        ("", "0"),
        ("prompt-lookup", "1"),
        ("prompt-lookup", "2"),
    }
    assert 1 <= len(workload["trials"]) <= 2
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    assert json.loads(out)["workloads"] == profile["workloads"]
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert "Best configuration by workload" in out and "json" in out and "profile.json" in out


def test_tune_reads_a_configuration_and_flags_override_it(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "tune.toml"
    path.write_text(
        'target = "embedded"\ndrafts = ["prompt-lookup"]\nlengths = ["fixed"]\nworkloads = ["prose", "json"]\n'
        'max_k = 7\nprompts = 1\nmax_new_tokens = 8\nout = "tuned"\nseconds = 0\n'
    )
    status, out, _ = run(capsys, "tune", "--config", str(path), "-w", "json", "--max-k", "1", "--json")
    assert status == 0
    profile = json.loads(out)
    assert list(profile["workloads"]) == ["json"]
    assert (tmp_path / "tuned" / "profile.json").is_file()
    assert profile["settings"] | {"longest": 1, "prompts": 1, "seconds": None} == profile["settings"]
    path.write_text(path.read_text() + 'backend = "vllm"\n')
    status, _, err = run(capsys, "tune", "--config", str(path))
    assert status == 2 and "vLLM" in err


def test_compare_shows_every_configuration(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    size = ("-w", "json", "--prompts", "1", "--max-new-tokens", "8", "-l", "2", "-l", "svip")
    drafts = ("-d", "same-architecture:draft-2-layers", "-d", "prompt-lookup")
    files = ("--csv", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "plot.png"))
    status, out, _ = run(capsys, "compare", *size, *drafts, *files, "--json")
    assert status == 0
    rows = json.loads(out)["results"]
    assert [(r["draft"], r["length"]) for r in rows] == [(d, n) for d in drafts[1::2] for n in ("2", "svip")]
    assert all(r["tokens"] == 8 and r["speedup"] > 0 for r in rows)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    status, out, _ = run(capsys, "compare", *size, *drafts)
    assert status == 0 and "prompt-lookup" in out and "svip" in out


def test_compare_samples_with_block_verification(capsys: pytest.CaptureFixture) -> None:
    size = ("-w", "json", "--prompts", "1", "--max-new-tokens", "8", "-l", "2", "-d", "prompt-lookup")
    status, out, _ = run(capsys, "compare", *size, "--temperature", "0.8", "--block", "--json")
    assert status == 0
    assert [r["verification"] for r in json.loads(out)["results"]] == ["token", "block"]


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
        (("tune", "--compile", "--backend", "vllm"), "the backend is vllm: leave it out (--compile)"),
        (("tune", "--packed", "--backend", "vllm"), "the backend is vllm: leave it out (--packed)"),
        (("generate", "--prompt", "x", "--packed", "--compile"), "choose one of them"),
        (("tune", "-w", "nothing"), "no embedded workload 'nothing'"),
        (("tune", "-w", "json", "--max-k", "9000"), "workload json, prompt"),
        (("tune", "-w", "json", "--length", "svp"), "Did you mean 'svip'"),
        (("tune", "-w", "json", "--draft", "prompt-look"), "Did you mean 'prompt-lookup'"),
        (("compare", "-w", "json", "-d", "prompt-lookup", "--block"), "temperature"),
        (("compare", "-w", "json", "-d", "nothing"), "unknown draft strategy 'nothing'"),
        (("compare", "-w", "json", "--csv", "/nowhere/rows.csv"), "/nowhere/rows.csv: cannot be written"),
        (("generate", "--prompt", "x", "--k", "svp"), "Did you mean 'svip'"),
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


@pytest.fixture
def traced_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small checkpoint whose programs run as they were traced; the compiler has tests of its own."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    return str(write_checkpoint(tmp_path / "target", "lfm2", **layers))


def test_generate_runs_compiled(capsys: pytest.CaptureFixture, traced_target: str) -> None:
    options = ("-d", "prompt-lookup", "-l", "1", "--max-new-tokens", "8", "--no-check", "--compare", "--json")
    arguments = ("generate", "--prompt", "a b a b a", "--target", traced_target, *options)
    status, out, err = run(capsys, *arguments, "--compile")
    assert status == 0 and json.loads(out)["same_output"], err
    status, _, err = run(capsys, *arguments, "--compile", "--rollback", "recompute")
    assert status == 2 and "cannot be compiled: it runs with rollback 'recompute'" in err


def test_generate_runs_packed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridspec.runtime.packed.LEAST", 1)
    arguments = ("--prompt", "a b a b a", "--k", "2", "--max-new-tokens", "8", "--compare", "--json", "--packed")
    status, out, err = run(capsys, "generate", *arguments)
    assert status == 0 and json.loads(out)["same_output"], err


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "field"), [("--compile", "compiled"), ("--packed", "packed")])
def test_tune_runs_in_a_study_of_its_own(
    capsys: pytest.CaptureFixture, tmp_path: Path, traced_target: str, flag: str, field: str
) -> None:
    (tmp_path / "prompts.txt").write_text("a b a b a\n")
    small = ("--prompts", "1", "--max-k", "1", "--trials", "1", "-l", "fixed", "--max-new-tokens", "8", "--no-check")
    arguments = ("tune", "--target", traced_target, "-d", "prompt-lookup", "-w", str(tmp_path / "prompts.txt"), *small)
    profiles = []
    for flags in ((), (flag,)):
        status, out, err = run(capsys, *arguments, "--out", str(tmp_path / "tuned"), "--json", *flags)
        assert status == 0, err
        profiles.append(json.loads(out))
    assert [p["target"][field] for p in profiles] == [False, True]
    # Nothing of the first study is taken over.
    trials = [p["workloads"]["prompts"]["trials"][0] for p in profiles]
    assert trials[0] != trials[1]


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
    for command in ("tune", "generate", "compare"):
        out = subprocess.run(
            [sys.executable, "-m", "hybridspec.cli.app", command, "--help"], capture_output=True, text=True, check=True
        )
        assert f"Example: hybridspec {command}" in out.stdout
