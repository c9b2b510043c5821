"""tune on real engines and servers: vLLM's CPU build, the embedded pair in bfloat16, one sequence at a time."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridspec.export.vllm import Export
from hybridspec.tuning.config_file import ServingOptions
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.profile_file import read_profile, write_profile
from hybridspec.tuning.run import TuneRequest
from hybridspec.tuning.server_run import ServerTuning
from hybridspec.tuning.study import Settings
from hybridspec.tuning.vllm_run import VllmTuning

pytestmark = pytest.mark.vllm
DRAFT = "same-architecture:draft-4-layers"
K = 3
SETTINGS = Settings(longest=K, prompts=2, max_new_tokens=24, trials=1, seconds=None)
#: A model this small is slowed down by threads.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmTuning:
    pytest.importorskip("vllm", reason="needs the environment that tests/vllm/environment.sh builds")
    for name, value in {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
        monkeypatch.setenv(name, value)
    request = TuneRequest(
        drafts=(DRAFT,),
        lengths=(),
        workloads=("code",),
        out=tmp_path / "out",
        settings=SETTINGS,
        backend="vllm",
        serving=ServingOptions(max_model_len=512, enforce_eager=True),
        python=sys.executable,
    )
    return VllmTuning(request)


def test_offline_engine(tuning: VllmTuning, tmp_path: Path) -> None:
    (study,) = tuning.studies
    result = study.run()
    (path,) = (tmp_path / "out" / "engines").glob(f"*K-{K}-*.answer.json")
    rounds = json.loads(path.read_text())["loads"]["code@1"]
    counters = [r["counters"] for r in rounds]
    drafts = sum(c["drafts"][0] for c in counters)
    survey = result.survey.drafts[DRAFT]
    assert survey.drafted == [drafts] * K and drafts > 0
    assert survey.accepted == [sum(c["accepted_tokens_per_pos"][i] for c in counters) for i in range(K)]
    assert sum(survey.accepted) == sum(c["accepted_tokens"][0] for c in counters) > 0
    assert [r["all_tokens"] for r in rounds] == [SETTINGS.max_new_tokens - 1] * len(rounds)
    # Each step that emits tokens is one row, and all but the last may be short of a draft.
    assert sum(r["all_rows"] for r in rounds) >= drafts
    write_profile(tuning.profile(), tmp_path / "out")
    row = read_profile(tmp_path / "out")["workloads"]["code"]["by_concurrency"]["1"]
    print(json.dumps(row, indent=1))
    assert row["acceptance"]["by_position"] == [n / drafts for n in survey.accepted]


@contextmanager
def serving(export: Export, log: Path) -> Iterator[str]:
    """Runs the exported command on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [w for w in shlex.split(export.command) if not w.startswith("VLLM_")]
    command = [str(Path(sys.executable).parent / words[0]), *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **export.environment}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_running_servers(tuning: VllmTuning, tmp_path: Path) -> None:
    exports = [tuning.export(c) for c in (Configuration(DRAFT, str(K)), PLAIN)]
    with serving(exports[0], tmp_path / "k.log") as fast, serving(exports[1], tmp_path / "plain.log") as plain:
        request = TuneRequest(
            workloads=("code",), settings=SETTINGS, backend="server", serving=ServingOptions(url=(fast, plain))
        )
        servers = ServerTuning(request)
        assert sorted(servers.servers) == [0, K]
        (study,) = servers.studies
        study.run()
        profile = servers.profile()
    write_profile(profile, tmp_path / "out")
    entry = read_profile(tmp_path / "out")["workloads"]["code"]["by_concurrency"]["1"]
    print(json.dumps(entry, indent=1))
    without, measured = entry["measured"]
    assert (without["k"], measured["k"]) == (0, K) and "warnings" not in entry
    assert measured["draft_tokens"] == K * measured["drafts"] and not without["drafts"]
    assert entry["acceptance"]["by_position"] == [n / measured["drafts"] for n in measured["accepted_by_position"]]
    # The server speculates as the offline engine does.
    survey = tuning.studies[0].run().survey.drafts[DRAFT]
    assert entry["acceptance"]["by_position"] == [a / d for a, d in zip(survey.accepted, survey.drafted, strict=True)]
