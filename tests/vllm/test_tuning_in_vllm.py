"""tune on a real engine and a real server: vLLM's CPU build, the embedded pair in bfloat16, one sequence at a time."""

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
from typer.testing import CliRunner

from hybridspec.cli.app import app
from hybridspec.engines.export.vllm import Export
from hybridspec.engines.server_metrics import ServerCounters
from hybridspec.tuning.backends.server_run import ServerTuning
from hybridspec.tuning.backends.vllm_run import VllmTuning
from hybridspec.tuning.config import ServingOptions, TuneConfig
from hybridspec.tuning.configuration import Configuration
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.study import WorkloadResult

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
DRAFT = "same-architecture:draft-4-layers"
K = 2
NEW_TOKENS = 24
SETTINGS = {"max_k": K, "prompts": 2, "max_new_tokens": NEW_TOKENS, "trials": 1}


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> VllmTuning:
    config = TuneConfig(
        **SETTINGS,
        drafts=(DRAFT,),
        workloads=("code",),
        out=tmp_path_factory.mktemp("tuned"),
        backend="vllm",
        serving=ServingOptions(max_model_len=512, enforce_eager=True),
        python=sys.executable,
    )
    return VllmTuning(config)


@pytest.fixture(scope="module")
def result(tuning: VllmTuning) -> WorkloadResult:
    (study,) = tuning.studies
    return study.run()


def test_acceptance_of_an_offline_engine_is_that_of_its_counters(tuning: VllmTuning, result: WorkloadResult) -> None:
    out = tuning.config.out
    (path,) = (out / "engines").glob(f"*K-{K}-*.answer.json")
    rounds = json.loads(path.read_text())["loads"]["code@1"]
    counters = [r["counters"] for r in rounds]
    drafts = sum(c["drafts"][0] for c in counters)
    survey = result.survey.drafts[DRAFT]
    assert survey.drafted == [drafts] * K and drafts > 0
    assert survey.accepted == [sum(c["accepted_tokens_per_pos"][i] for c in counters) for i in range(K)]
    assert sum(survey.accepted) == sum(c["accepted_tokens"][0] for c in counters) > 0
    assert [r["all_tokens"] for r in rounds] == [NEW_TOKENS - 1] * len(rounds)
    # Each step that emits tokens is one row, and all but the last may be short of a draft.
    assert sum(r["all_rows"] for r in rounds) >= drafts
    tuning.profile().save(out)
    row = Profile.load(out)["workloads"]["code"]["by_concurrency"]["1"]
    print(json.dumps(row.to_dict(), indent=1))
    assert row["acceptance"]["by_position"] == [n / drafts for n in survey.accepted]


@contextmanager
def serving(export: Export, log: Path) -> Iterator[str]:
    """Runs the exported command on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [w for w in shlex.split(export.command) if not w.startswith("VLLM_")]
    command = [str(Path(sys.executable).parent / words[0]), *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    variables = {**os.environ, **export.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
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


def metrics(url: str) -> ServerCounters:
    return ServerCounters.read(urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode())


def test_a_running_server(tuning: VllmTuning, result: WorkloadResult, tmp_path: Path) -> None:
    from openai import OpenAI

    with serving(tuning.export(Configuration(DRAFT, str(K))), tmp_path / "server.log") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        before = metrics(url)
        answer = client.completions.create(model=model, prompt="def add(a, b):", max_tokens=20, temperature=0)
        served = metrics(url).since(before)
        assert answer.usage.completion_tokens == 20 and answer.choices[0].text
        assert served.drafts > 0 and served.drafted == K * served.drafts
        # The first token comes from the prompt, each step gives one more than it accepts.
        assert served.accepted + served.drafts + (K + 1) >= 19
        audit = CliRunner().invoke(app, ["audit", "server", url, "--prompts", "2", "--new-tokens", "16", "--json"])
        print(audit.stdout)
        assert audit.exit_code == 0, audit.output
        serves = ServingOptions(url=(url,))
        servers = ServerTuning(TuneConfig(**SETTINGS, workloads=("code",), backend="server", serving=serves))
        assert list(servers.servers) == [K]
        (study,) = servers.studies
        study.run()
        profile = servers.profile()
    profile.save(tmp_path / "out")
    entry = Profile.load(tmp_path / "out")["workloads"]["code"]["by_concurrency"]["1"]
    print(json.dumps(entry.to_dict(), indent=1))
    (measured,) = entry["measured"]
    assert measured["k"] == K and "warnings" not in entry
    assert measured["draft_tokens"] == K * measured["drafts"] > 0
    assert entry["acceptance"]["by_position"] == [n / measured["drafts"] for n in measured["accepted_by_position"]]
    # The server speculates as the offline engine does.
    survey = result.survey.drafts[DRAFT]
    assert entry["acceptance"]["by_position"] == [a / d for a, d in zip(survey.accepted, survey.drafted, strict=True)]
