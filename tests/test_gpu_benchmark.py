"""``python -m benchmarks gpu --device cpu --smoke`` runs every section, and tells when one fails."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_bench
from hybridspec.state.static_layers import Group

SMOKE = ["--device", "cpu", "--smoke"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    assert gpu.main([*SMOKE, "--k", "2", "--repeats", "1", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_section_has_results(result: dict) -> None:
    assert set(gpu.SECTIONS) <= set(result)
    assert result["failed"] == {}
    assert result["left_out"] == []
    for path in ("eager", "static"):
        assert all(result["passes"][f"{path}, K={k}"]["milliseconds"] > 0 for k in range(3))
        assert result["loop"][path]["step"] >= result["loop"][path]["verify"] > 0
    modes = ("tape", "slots", "recompute", "static")
    assert set(result["rollbacks"]) == {f"{mode}, {accepted} of 2" for mode in modes for accepted in range(3)}


def test_bytes_are_what_can_be_counted_by_hand(result: dict) -> None:
    small, layers = gpu_bench.SMALL, 3
    heads, key, value = (small[f"linear_{x}"] for x in ("num_value_heads", "key_head_dim", "value_head_dim"))
    memory = result["memory"]
    assert memory["state_plane"] == 4 * layers * heads * key * value
    assert memory["tape_of_a_token"] == 4 * layers * heads * (key + value + 1)
    assert memory["keys_and_values_of_a_token"] == 2 * 2 * small["num_key_value_heads"] * small["head_dim"]


def test_a_wrong_result_fails_its_section_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    # Keeps the state of before the block when part of it is kept.
    monkeypatch.setattr(
        Group, "settle", lambda self, keep, place: self.planes[place.other].copy_(self.planes[place.parity])
    )
    path = tmp_path / "gpu.json"
    sections = ["--section", "equality", "--section", "memory"]
    # The self-test at load time would notice first.
    monkeypatch.setattr("hybridspec.runtime.static_runner.check_rollback", lambda runner: None)
    assert gpu.main([*SMOKE, *sections, "--k", "2", "--repeats", "1", "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert "WrongResultError: static, 1 kept, layer 0: off by" in result["failed"]["equality"]
    assert "memory" in result
    assert "1 of 2 sections failed" in capsys.readouterr().out


def test_no_section_starts_after_the_time(capsys: pytest.CaptureFixture) -> None:
    assert gpu.main([*SMOKE, "--seconds", "-1"]) == 0
    assert "no time left for bandwidth, kernels" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--k", "0"], ["--section", "nothing"], ["--device", "cpu"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gpu.main(arguments)
    assert stop.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda"])
    assert "no CUDA device is visible" in capsys.readouterr().err
