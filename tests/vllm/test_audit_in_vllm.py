"""The audit of real engines: what vLLM's CPU build gets wrong is found, what it gets right passes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridspec.cli.app import app
from tests.vllm.models import random_model, save

pytestmark = pytest.mark.vllm


def audit(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    options = ["--python", sys.executable, "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    result = CliRunner().invoke(app, ["audit", "vllm", str(folder), *options, *arguments, "--json"])
    assert result.stdout.startswith("{"), result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("case", ["batch", pytest.param("chunked prefill", marks=pytest.mark.slow)])
def test_a_dense_target_is_clean(case: str, tmp_path: Path) -> None:
    status, answer = audit(save(random_model("qwen3"), tmp_path), "--case", case)
    assert status == 0
    assert [(f["run"], f["status"]) for f in answer["findings"]] == [("plain", "equal"), ("oracle", "equal")]
    oracle = answer["findings"][1]
    coverage = oracle["coverage"]
    assert coverage["missing"] == []
    assert coverage["lost"] == 0
    assert min(coverage["empty"], coverage["ragged"]) > 0
    assert oracle["tokens_compared"] == 5 * 48


def test_a_mamba_hybrid_is_corrupt(tmp_path: Path) -> None:
    """vLLM 0.32's CPU convolution ignores how many tokens were accepted."""
    folder = save(random_model("granitemoehybrid"), tmp_path)
    status, answer = audit(folder, "--case", "one at a time", "--new-tokens", "24")
    assert status == 1
    assert answer["engine"]["hybrid"]
    plain, oracle = answer["findings"]
    assert plain["status"] == "equal"
    assert oracle["status"] == "corrupt"
    assert max(d["margin"] for d in oracle["divergences"]) > 10 * answer["near_tie"]
