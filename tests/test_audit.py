"""The audit without an engine: verdicts, the oracle's plan, what a child says, and a server that answers by rule."""

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridspec.cli.app import app
from hybridspec.engines.audit.coverage import read_coverage
from hybridspec.engines.audit.engine import CHILD, last_error
from hybridspec.engines.audit.verdict import compare
from hybridspec.engines.server_metrics import ServerCounters

K = 3


@pytest.fixture(scope="module")
def oracle_module() -> ModuleType:
    """As the engine's Python imports it."""
    spec = importlib.util.spec_from_file_location("oracle", CHILD / "hybridspec_audit_oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def top(**logprobs: float) -> dict[str, float]:
    return {name[1:]: value for name, value in logprobs.items()}


def test_a_near_tie_is_told_from_corruption() -> None:
    truth = [[5, 6, 7], [5, 8, 9]]
    tops = [[top(t5=-0.1), top(t6=-0.7, t9=-0.8), top(t7=-0.1)], [top(t5=-0.1), top(t8=-0.5), top(t9=-0.1)]]
    assert compare(truth, tops, truth, 0.25).status == "equal"
    tie = compare(truth, tops, [[5, 9, 9], [5, 8, 9]], 0.25)
    assert (tie.status, tie.compared) == ("near tie", 1 + 3)
    assert (tie.worst.sequence, tie.worst.position, tie.worst.expected, tie.worst.got) == (0, 1, 6, 9)
    assert tie.worst.margin == pytest.approx(0.1)
    assert compare(truth, tops, [[5, 9, 9], [5, 8, 9]], 0.05).status == "corrupt"


def test_a_token_that_is_none_of_the_likeliest_is_corrupt_and_so_is_an_early_end() -> None:
    tops = [[top(t5=-0.1, t4=-0.11), top(t6=-0.1, t4=-0.11)]]
    unlikely = compare([[5, 6]], tops, [[5, 3]], 0.25)
    assert unlikely.status == "corrupt"
    assert unlikely.worst.at_least
    assert compare([[5, 6]], tops, [[5]], 0.25).status == "corrupt"


@pytest.mark.parametrize("ragged", [False, True])
def test_an_oracle_on_a_right_engine_sees_every_number_of_accepted_tokens(
    ragged: bool, oracle_module: ModuleType, tmp_path: Path
) -> None:
    """An engine that accepts what agrees with the truth, four rows together."""
    truth = [[10 + row, *range(20, 30), *((7 * i + row) % 50 for i in range(60))] for row in range(4)]
    prompt, log = 5, tmp_path / "log.jsonl"
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"sequences": [[t, prompt] for t in truth], "ragged": ragged, "log": str(log)}))
    oracle = oracle_module.Oracle(
        SimpleNamespace(
            additional_config={"hybridspec_audit": str(job)},
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            model_config=SimpleNamespace(get_vocab_size=lambda: 60),
        )
    )
    lengths = [prompt + 1] * 4
    while min(lengths) < len(truth[0]):
        table = np.array(truth)
        drafts = oracle.propose([[1]] * 4, lengths, table)
        for row, draft in enumerate(drafts):
            rest = truth[row][lengths[row] :]
            accepted = 0
            while accepted < min(len(draft), len(rest)) and draft[accepted] == rest[accepted]:
                accepted += 1
            assert len(draft) <= K
            lengths[row] = min(lengths[row] + accepted + 1, len(truth[0]))
    coverage = read_coverage(log, K)
    assert coverage.missing == []
    assert coverage.lost == 0
    if ragged:
        assert coverage.ragged > 3
        assert coverage.empty > 4
    stray = np.array([[1, 2, 3, 4, 5, 6, 7]])
    assert oracle.propose([[1]], [7], stray) == [[]]
    assert read_coverage(log, K).lost == 1


def test_the_error_of_a_dead_engine_is_the_one_that_killed_it() -> None:
    log = """(Worker pid=7) ERROR 11-30 RuntimeError: head_dim=16 is not supported
Traceback (most recent call last):
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
/usr/lib/python3/resource_tracker.py:254: UserWarning: leaked
"""
    assert last_error(log) == "RuntimeError: head_dim=16 is not supported"
    assert last_error("one\nthe last line\n\n") == "the last line"


def test_counters_of_metrics() -> None:
    text = """# HELP vllm:spec_decode_num_drafts_total Number
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
"""
    found = ServerCounters.read(text)
    assert (found.drafts, found.drafted, found.accepted_tokens, found.accepted) == (10, 30, 12, (8, 4))
    assert found.to_dict()["acceptance_by_position"] == [0.8, 0.4]
    assert found.since(found).accepted_tokens == 0


class Rule(BaseHTTPRequestHandler):
    """A server whose model adds 1 to the last token; ``wrong`` makes it add 2 to every fifth when it generates."""

    wrong = drafting = False
    lock = threading.Lock()
    drafts = 0

    def log_message(self, *_: object) -> None:
        """Silent."""

    def answer(self, value: object) -> None:
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "counter"}]})
        elif self.path == "/version":
            self.answer({"version": "0.0.test"})
        else:
            drafts = type(self).drafts
            text = 'vllm:cache_config_info{enable_prefix_caching="True"} 1.0\n'
            for name, value in (("drafts", drafts), ("draft_tokens", 2 * drafts), ("accepted_tokens", drafts)):
                text += f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0\n'
            self.answer(text + f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {drafts}.0\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt: list[int] | str = body["prompt"]
        tokens = [len(prompt)] if isinstance(prompt, str) else prompt
        choice: dict[str, Any] = {"prompt_token_ids": tokens}
        if body.get("prompt_logprobs"):
            rows: list[dict | None] = [None]
            for before, token in zip(tokens, tokens[1:], strict=False):
                rows.append({str(token): {"logprob": -9.0}} | {str(before + 1): {"logprob": -0.01}})
            choice["prompt_logprobs"] = rows
        else:
            made = []
            for i in range(body["max_tokens"]):
                made.append(([*tokens, *made])[-1] + (2 if self.wrong and i % 5 == 4 else 1))
            choice["token_ids"] = made
            with self.lock:
                type(self).drafts += 3 if self.drafting else 0
        self.answer({"choices": [choice]})


@pytest.fixture
def serve() -> Iterator[Any]:
    running = []

    def start(**attributes: bool) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Rule,), attributes | {"drafts": 0}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def audit(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["audit", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {}


def test_a_right_server_passes(serve: Any) -> None:
    status, answer = audit("server", serve(drafting=True) + "/v1", "--prompts", "3", "--reference", serve())
    assert status == answer["exit_status"] == 0
    assert [check["status"] for check in answer["checks"]] == ["equal"] * 4
    assert answer["acceptance"] == {
        "drafts": 18, "draft_tokens": 36, "accepted_tokens": 18, "acceptance_by_position": [1.0],
    }  # fmt: skip
    assert answer["prefix_caching"] is True
    assert "prefix caching" in answer["warnings"][0]


def test_a_wrong_server_is_found_without_a_reference(serve: Any) -> None:
    status, answer = audit("server", serve(drafting=True, wrong=True), "--prompts", "2")
    assert status == 1
    first = answer["checks"][0]["divergences"][0]
    assert (first["position"], first["got"] - first["expected"]) == (4, 1)


def test_a_server_that_drafts_nothing_tells_nothing(serve: Any) -> None:
    status, answer = audit("server", serve(), "--prompts", "2")
    assert status == 2
    assert "nothing was drafted" in answer["warnings"][0]


#: Stands for vLLM in the child: answers by its job, wrong where it is told to be.
FAKE_ENGINE = """
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[-1]).read_text())
speculates = "speculative_config" in job["overrides"]
if "--die" in job["arguments"] and speculates:
    raise RuntimeError("no state for you")
tokens = [[7, 8, 9, 4]] * 5
if "--wrong" in job["arguments"] and speculates:
    tokens = [[7, 8, 9, 4]] * 4 + [[7, 8, 3, 4]]
tops = [[{str(t): -0.1, "3": -5.0} for t in row] for row in tokens]
Path(job["answer"]).write_text(json.dumps(dict(
    version="0", dtype="float32", hybrid=True, prefix_caching=False, prompts=[[1, i] for i in range(5)],
    method=job["overrides"].get("speculative_config", {}).get("method"), counters={},
    rounds=[tokens] * job["rounds"], logprobs=tops)))
"""


@pytest.fixture
def engine_python(tmp_path: Path) -> str:
    script = tmp_path / "engine"
    script.write_text(f"#!{sys.executable}\n{FAKE_ENGINE}")
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(os.name == "nt", reason="a script stands for Python")
def test_the_audit_of_an_engine_and_its_exit_status(engine_python: str) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 2}'
    given = ("vllm", "some-target", "--python", engine_python, "--speculative-config", config)
    status, answer = audit(*given)
    assert (status, answer["k"], answer["near_tie"]) == (0, 2, 0.005)
    assert [(f["case"], f["run"], f["status"]) for f in answer["findings"]] == [
        *((case, run, "equal") for case in ("one at a time", "batch", "chunked prefill", "prefix caching")
          for run in ("plain", "oracle")),
        ("as configured", "plain", "equal"),
        ("as configured", "ngram", "equal"),
    ]  # fmt: skip
    status, answer = audit(*given, "--case", "batch", "--wrong")
    assert status == 1
    assert [f["status"] for f in answer["findings"]] == ["equal", "corrupt"] * 2
    assert answer["findings"][1]["divergences"] == [
        {"sequence": 4, "position": 2, "expected": 9, "got": 3, "margin": pytest.approx(4.9), "at_least": False}
    ]
    status, answer = audit(*given, "--case", "none", "--die")
    assert status == 1
    assert answer["findings"][1]["error"].startswith("RuntimeError: no state for you (log: ")


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    for arguments, message in [
        (("vllm", "t", "--case", "bach"), "--case bach"),
        (("vllm", "t", "--case", "none"), "nothing to run"),
        (("vllm", "t", "--speculative-config", "{"), "no JSON"),
        (("vllm", "t", "--speculative-config", "[]"), "JSON object"),
        (("vllm", "t", "--python", str(tmp_path / "none")), "cannot be started"),
        (("server", "127.0.0.1:8000"), "give a URL"),
        (("server", "http://127.0.0.1:9"), "Is a server running there?"),
    ]:
        result = CliRunner().invoke(app, ["audit", *arguments])
        assert message in str(result.exception), arguments
