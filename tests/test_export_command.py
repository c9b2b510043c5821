"""``hybridspec export vllm`` as a user types it."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridspec.embedded import DRAFTS, TARGET
from hybridspec.engines.export import key_sets
from hybridspec.tuning import profile as profiles
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.profile_building import vllm_setting
from tests.test_cli import run

DRAFT = DRAFTS["draft-2-layers"]
SPEC = "same-architecture:draft-2-layers"
TARGET_ONLY = ("export", "vllm", "--target", str(TARGET))


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sets, "installed", lambda: None)


def workload(draft: str, length: str, k: int | None, **changes: object) -> dict:
    chosen = {
        "draft": draft,
        "length": length,
        "segments": False,
        "verification": "token",
        "label": f"{draft} {length}",
    }
    row = {
        "settings": {},
        "complete": True,
        "stopped": "done",
        "chosen": chosen if k is not None else None,
        "reason": "fastest",
        "best_k": k,
        "speedup": 1.5,
        "acceptance_length": 2.1,
        "acceptance": {draft: {"by_position": [0.7, 0.4, 0.45], "interval_90": [[0, 1]] * 3, "steps": 50}},
        "costs": None,
        "predicted": [],
        "trials": [],
        "by_concurrency": None,
        "vllm": None,
    }
    return row | changes


@pytest.fixture
def tuned(tmp_path: Path) -> Callable[..., Path]:
    """Writes a profile with the workloads that are given."""

    def write(target: Path | None = TARGET, **workloads: dict) -> Path:
        model = {"name": "target", "path": target and str(target), "fingerprint": "x", "dtype": "float32"}
        content = {
            "schema": profiles.SCHEMA,
            "hybridspec": "0",
            "created": "now",
            "backend": "torch",
            "target": model,
            "drafts": {SPEC: {"name": "draft", "path": str(DRAFT)}, "prompt-lookup": {"name": "prompt-lookup"}},
            "machine": {},
            "settings": {},
            "workloads": workloads,
        }
        (tmp_path / profiles.FILE).write_text(json.dumps(content))
        return tmp_path

    return write


def at_once(k: int) -> dict:
    """An entry of ``by_concurrency``; the export reads ``k`` alone."""
    unknown = ("speedup", "interval_90", "acceptance", "acceptance_length", "tokens_per_second", "predicted")
    return {"k": k, "draft": "prompt-lookup" if k else None, "reason": "measured", **dict.fromkeys(unknown)}


def test_a_profile_in_json(capsys: pytest.CaptureFixture, tuned: Callable) -> None:
    folder = tuned(
        code=workload(SPEC, "3", 3),
        json=workload(SPEC, "svip", 8),
        prose=workload("prompt-lookup", "2", 2, by_concurrency={"1": at_once(2), "8": at_once(0)}),
        math=workload("", "0", 0),
    )
    status, out, _ = run(capsys, "export", "vllm", str(folder), "--json")
    assert status == 0
    rows = {row["workload"]: row for row in json.loads(out)["exports"]}
    assert rows["code"]["speculative_config"]["method"] == "custom_class" and rows["code"]["version"] == "vLLM 0.33.0"
    assert rows["code"]["additional_config"] == {"hybridspec": {"draft": str(DRAFT)}}
    assert rows["json"]["additional_config"] == {"hybridspec": {"draft": str(DRAFT), "length": "svip"}}
    assert rows["prose"]["speculative_config"] == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 8, 0]],
    }
    assert rows["math"]["speculative_config"] is None and "--speculative-config" not in rows["math"]["command"]
    status, out, _ = run(
        capsys, "export", "vllm", str(folder), "-w", "code", "--synthetic", "--only", "speculative-config"
    )
    assert status == 0
    assert json.loads(out)["synthetic_acceptance_rates"] == [0.7, 0.4, 0.4]


def test_what_is_printed(capsys: pytest.CaptureFixture, tuned: Callable) -> None:
    folder = tuned(code=workload(SPEC, "3", 3))
    status, out, _ = run(capsys, "export", "vllm", str(folder), "--gpu-memory", "1")
    assert status == 0
    for part in ("--speculative-config", "Command", "Python", "max_num_seqs by memory", "Prefix caching is off"):
        assert part in out
    assert "x 738.0 KiB of state" in out
    status, command, _ = run(capsys, "export", "vllm", str(folder), "--gpu-memory", "1", "--only", "command")
    assert command.strip() in out and command.count("\n") == 1
    assert shlex.split(command)[:4] == ["VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve", str(TARGET)]
    status, python, _ = run(capsys, "export", "vllm", str(folder), "--only", "python")
    assert compile(python, "python", "exec")


def test_refusals_say_why_and_give_status_1(capsys: pytest.CaptureFixture, tuned: Callable) -> None:
    status, out, err = run(capsys, *TARGET_ONLY, "--method", "mtp", "--k", "2")
    assert status == 1 and not out
    assert "vLLM 0.33.0, mtp: The checkpoint has no tensors" in err and "Instead:" in err
    folder = tuned(code=workload(SPEC, "3", 3), prose=workload("full-attention", "2", 2))
    status, out, err = run(capsys, "export", "vllm", str(folder))
    assert status == 1
    assert "custom_class" in out and "prose: not exported" in err
    status, out, _ = run(capsys, "export", "vllm", str(folder), "--json")
    rows = json.loads(out)["exports"]
    assert status == 1
    assert [bool(row["refused"]) for row in rows] == [False, True]
    assert set(rows[1]["refused"]) == {"version", "method", "what", "instead"}


def test_without_a_profile(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = run(capsys, *TARGET_ONLY, "--draft", str(DRAFT), "--length", "svip:longest=6", "--json")
    (row,) = json.loads(out)["exports"]
    assert status == 0
    assert row["speculative_config"]["num_speculative_tokens"] == 6 and row["workload"] is None
    arguments = ("-e", "tensor-parallel-size=2", "-e", 'hf_overrides={"a": 1}', "--max-num-seqs", "7")
    status, out, _ = run(capsys, *TARGET_ONLY, "--method", "ngram", "--k", "2", *arguments, "--json")
    (row,) = json.loads(out)["exports"]
    assert status == 0
    assert row["engine_arguments"] == {
        "tensor_parallel_size": 2,
        "hf_overrides": {"a": 1},
        "max_num_seqs": 7,
        "enable_prefix_caching": False,
    }
    status, out, _ = run(
        capsys, *TARGET_ONLY, "--method", "ngram", "--k", "2", "--synthetic", "--acceptance", "0.9,0.5", "--json"
    )
    assert json.loads(out)["exports"][0]["speculative_config"]["synthetic_acceptance_rates"] == [0.9, 0.5]


def test_serving_options_of_a_configuration_file(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "model")
    file = tmp_path / "tune.toml"
    file.write_text('target = "model"\ndrafts = ["mtp"]\n[serving]\nmax_num_seqs = 9\nengine = {block_size = 32}\n')
    status, out, _ = run(
        capsys,
        "export",
        "vllm",
        "--config",
        str(file),
        "--method",
        "ngram",
        "--k",
        "2",
        "-e",
        "max_num_seqs=5",
        "--json",
    )
    (row,) = json.loads(out)["exports"]
    assert status == 0
    assert row["target"] == str(tmp_path / "model")
    assert row["engine_arguments"] == {"max_num_seqs": 5, "block_size": 32, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a profile, or --target"),
        (("--target", "/nowhere", "--method", "ngram", "--k", "2"), "/nowhere"),
        ((*TARGET_ONLY[2:], "--k", "2"), "--method mtp"),
        ((*TARGET_ONLY[2:], "--method", "ngram"), "--k is missing"),
        ((*TARGET_ONLY[2:], "--method", "magic", "--k", "2"), "unknown method 'magic'"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "-w", "code"), "no profile was given"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--vllm-version", "0.1"), "known are 0.32.0, 0.33.0"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--device", "tpu"), "choose one of gpu, cpu"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "-e", "max_num_seq=2"), "Did you mean 'max_num_seqs'"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "-e", "seed"), "NAME=VALUE"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--synthetic"), "--acceptance"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--acceptance", "a"), "numbers"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--acceptance", "2,1"), "between 0 and 1"),
        ((*TARGET_ONLY[2:], "--method", "ngram", "--k", "2", "--gpu-memory", "-1"), "above 0"),
        ((*TARGET_ONLY[2:], "--draft", str(DRAFT), "--length", "svpi"), "Did you mean 'svip'?"),
        (("/nowhere/profile.json",), "/nowhere/profile.json: cannot be read"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = run(capsys, "export", "vllm", *arguments)
    assert status == 2, (out, err)
    assert words in err and "Traceback" not in err


def test_bad_profiles(capsys: pytest.CaptureFixture, tuned: Callable) -> None:
    folder = str(tuned(code=workload(SPEC, "3", None)))
    for arguments, words in (
        (("-w", "cod"), "no workload 'cod'; it has code"),
        ((), "workloads.code.chosen"),
        (("--k", "3"), "leave those options out"),
    ):
        status, _, err = run(capsys, "export", "vllm", folder, *arguments)
        assert status == 2 and words in err
    folder = str(tuned(None, code=workload(SPEC, "3", 3)))
    status, _, err = run(capsys, "export", "vllm", folder)
    assert status == 2 and "target.path" in err
    folder = str(tuned(code=workload("same-architecture:gone", "3", 3)))
    status, _, err = run(capsys, "export", "vllm", folder)
    assert status == 2 and "drafts.same-architecture:gone.path" in err
    folder = str(tuned(code=workload(SPEC, "3", 3, by_concurrency={"1": 3})))
    status, _, err = run(capsys, "export", "vllm", folder)
    assert status == 2 and "by_concurrency" in err


def test_profiles_hold_the_same_settings() -> None:
    target = {"path": str(TARGET)}
    drafts = {SPEC: {"path": str(DRAFT)}, "full-attention": {"name": "full-attention"}}
    found = vllm_setting(Configuration(SPEC, "svip:longest=5"), target, drafts)
    assert found["speculative_config"]["num_speculative_tokens"] == 5
    assert found["additional_config"]["hybridspec"] == {"draft": str(DRAFT), "length": "svip:longest=5"}
    assert "lets no proposer do" in vllm_setting(Configuration("full-attention", "2"), target, drafts)["refused"]
    assert vllm_setting(PLAIN, target, drafts) is None
    assert vllm_setting(Configuration(SPEC, "2"), {"path": None}, drafts) is None
