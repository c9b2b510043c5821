"""tune --backend server: what it makes of running servers, from their counters in Prometheus' text format."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridspec.cli.app import app
from hybridspec.engines.server_metrics import ServerCounters
from hybridspec.errors import InputError
from hybridspec.tuning.backends.server_run import ServerTuning
from hybridspec.tuning.config import ServingOptions, TuneConfig
from hybridspec.tuning.profile import Profile
from tests.fake_server import FakeServer, serving

Serve = Callable[..., FakeServer]
POSITIONS = [0.75, 0.5, 0.5]
TAU = [1.0, 1.75, 2.25, 2.75]
SETTINGS = {"max_k": 3, "prompts": 2, "max_new_tokens": 1200}


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda *a, **o: stack.enter_context(serving(FakeServer(*a, **o)))


def tune(*servers: FakeServer, concurrency: tuple[int, ...] = (1,), workload: str = "code") -> dict:
    config = TuneConfig(
        workloads=(workload,),
        **SETTINGS,
        backend="server",
        serving=ServingOptions(url=tuple(s.url for s in servers), concurrency=concurrency),
    )
    tuning = ServerTuning(config)
    for study in tuning.studies:
        study.run()
    return tuning.profile()


def test_one_server_tells_what_its_k_gives_and_what_others_may_cost(serve: Serve, tmp_path: Path) -> None:
    profile = tune(serve(3, 0.02), concurrency=(1, 4))
    profile.save(tmp_path)
    row = Profile.load(tmp_path)["workloads"]["code"]
    assert row["chosen"] is None and row["speedup"] is None
    for requests in (1, 4):
        entry = row["by_concurrency"][str(requests)]
        assert entry["k"] == 3 and entry["speedup"] is None and entry["predicted"] is None
        assert entry["acceptance"]["by_position"] == pytest.approx(POSITIONS, abs=0.01)
        assert entry["acceptance_length"] == pytest.approx(TAU[3], rel=0.01)
        assert entry["tokens_per_second"] == pytest.approx(requests * TAU[3] / 0.02, rel=0.01)
        assert entry["measured"][0]["step_seconds"] == pytest.approx(0.02)
        shares = [entry["by_k"][str(k)]["breaks_even_below"] for k in range(4)]
        assert shares == pytest.approx([tau / TAU[3] for tau in TAU], rel=0.01)
        assert "warnings" not in entry
    assert "K = 3 gives 2.75 tokens per step of 20.0 ms" in row["reason"]
    assert "no speculation would be faster if a step takes less than 36% of that" in row["reason"]
    assert "K = 1 if one takes less than 64%, K = 2 if one takes less than 82%" in row["reason"]


def test_a_second_server_without_speculation_tells_the_speed_up_and_the_best_k(serve: Serve) -> None:
    # A step costs 10 ms and 7 ms for each drafted token.
    row = tune(serve(3, 0.031), serve(0, 0.010))["workloads"]["code"]
    entry = row["by_concurrency"]["1"]
    speedups = [TAU[k] * 10 / (10 + 7 * k) for k in range(4)]
    assert entry["k"] == 0 and entry["speedup"] == 1.0 and "loses" in entry["reason"]
    assert row["trials"][0]["speedup"] == pytest.approx(speedups[3], rel=0.01)
    assert [entry["by_k"][str(k)]["predicted"] for k in range(4)] == pytest.approx(speedups, rel=0.01)
    assert "K = 1, which no server runs, is predicted to be 1.03 times as fast as no speculation" in entry["reason"]
    assert row["costs"]["draft_ratio"]["served"] == pytest.approx(0.7, rel=0.01)


def test_speculation_that_pays_is_chosen(serve: Serve, tmp_path: Path) -> None:
    profile = tune(serve(3, 0.013), serve(0, 0.010))
    profile.save(tmp_path)
    row = Profile.load(tmp_path)["workloads"]["code"]
    assert row["chosen"]["label"] == "served K=3" and row["best_k"] == 3
    assert row["speedup"] == pytest.approx(TAU[3] / 1.3, rel=0.01)
    assert row["speedup_interval_90"] == row["by_concurrency"]["1"]["interval_90"]
    assert not list(tmp_path.glob("speculative-config-*"))


def test_two_servers_that_speculate_are_compared_with_a_step_beyond_them(serve: Serve) -> None:
    row = tune(serve(3, 0.031), serve(1, 0.017))["workloads"]["code"]
    entry = row["by_concurrency"]["1"]
    assert entry["k"] == 1 and entry["speedup"] is None
    assert entry["predicted"] == pytest.approx(1.75 * 10 / 17, rel=0.01)
    assert [m["k"] for m in entry["measured"]] == [1, 3]
    # Nothing beats K = 1 by more than 2 %.
    assert "no server runs" not in entry["reason"]
    cheap = tune(serve(3, 0.040), serve(1, 0.020))["workloads"]["code"]["by_concurrency"]["1"]
    assert "no speculation, which no server runs, is predicted to be 1.14 times as fast as K = 1" in cheap["reason"]


def test_traffic_of_others_is_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server, real = serve(3, 0.02), FakeServer.generate

    def crowded(self: FakeServer, body: dict) -> None:
        real(self, body)
        if len(self.bodies) == 2:
            real(self, body)

    monkeypatch.setattr(FakeServer, "generate", crowded)
    entry = tune(server)["workloads"]["code"]["by_concurrency"]["1"]
    assert entry["warnings"][0].startswith("1 requests of others")


def test_what_is_sent(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "plain"}) + "\n")
    server = serve(2, 0.02)
    profile = tune(server, workload=f"{file}:temperature=0.7,max_new_tokens=9")
    assert list(profile["workloads"]) == ["chat"]
    sent = {body["path"]: body for body in server.bodies}
    assert sent["/v1/chat/completions"]["messages"] == messages
    assert sent["/v1/completions"]["prompt"] == "plain"
    for body in server.bodies:
        assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.7, 9, 0)
        assert body["authorization"] == "Bearer secret"


def test_servers_that_cannot_be_judged(serve: Serve) -> None:
    with pytest.raises(InputError, match="does not speculate"):
        tune(serve(0, 0.01))
    with pytest.raises(InputError, match="both speculate with K = 2"):
        tune(serve(2, 0.01), serve(2, 0.02))
    with pytest.raises(InputError, match="without --disable-log-stats"):
        tune(serve(2, 0.01, stats=False))
    with pytest.raises(InputError, match="different models: large, tiny"):
        tune(serve(2, 0.01), serve(3, 0.01, model="large"))
    with pytest.raises(InputError, match=r"workload code, prompt code-\S+: .*400.*too long"):
        tune(serve(2, 0.01, refuse="prompt too long"))
    with pytest.raises(InputError, match="step times do not grow with K"):
        tune(serve(2, 0.001), serve(1, 0.001), serve(0, 0.03))
    with pytest.raises(InputError, match="Is a server running there"):
        tune(FakeServer(1, 0.1, url="http://127.0.0.1:1"))


def test_command_line(serve: Serve, tmp_path: Path) -> None:
    server = serve(3, 0.02)
    config = tmp_path / "tune.toml"
    config.write_text(f'backend = "server"\nworkloads = ["json"]\n[serving]\nurl = "{server.url}/v1"\n')
    arguments = ["tune", "--config", str(config), "--out", str(tmp_path / "out"), "--prompts", "2"]
    result = CliRunner().invoke(app, [*arguments, "--concurrency", "2"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "requests at once" in text and "K = 3 gives" in text
    result = CliRunner().invoke(app, [*arguments, "--json"])
    profile = json.loads(result.stdout)
    assert profile["engine"] == {"version": "0.32.0", "urls": {"3": server.url}}
    assert profile["target"]["name"] == "tiny"


def test_counters_of_several_engines_add_up_and_of_other_models_do_not() -> None:
    text = "\n".join(
        [
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 3.0',
            'vllm:spec_decode_num_drafts_total{engine="1",model_name="a"} 4.0',
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="b"} 50.0',
            'vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e9',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 1.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0",model_name="a"} 2.0',
            'vllm:inter_token_latency_seconds_count{model_name="a"} 9.0',
            'vllm:inter_token_latency_seconds_sum{model_name="a"} 2.5e-1',
        ]
    )
    found = ServerCounters.read(text, "a")
    assert (found.drafts, found.accepted, found.rows, found.decode_seconds) == (7, (2, 1), 9, 0.25)
    later = ServerCounters(0, 0, 12, 1.25, 9, 0, (4, 2), 6)
    assert later.since(found) == ServerCounters(0, 0, 3, 1.0, 2, 0, (2, 1), 6)
    unreadable = text.replace("\n", '\nsome words\nvllm:other{a="b" 1\n', 1)
    assert ServerCounters.read(unreadable, "a") == found
    assert ServerCounters.read("") == ServerCounters(0, 0, None, 0.0, 0, 0, (), 0)
