"""``python -m benchmarks``: its commands, the records they leave, and the page made of them."""

import json
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import command, decoder_comparison, decoder_rounds, growth, peer_environment, speculative, table
from benchmarks.__main__ import COMMANDS, main
from benchmarks.decoder_rounds import PEERS, Entry, Outcome, RoundPrompt, Worker, WorkerFailed
from benchmarks.decoders import CompiledGenerate, CompiledLoop, CompiledOurs, Loop, Ours, StaticGenerate, decoder_class
from benchmarks.grids import Grid
from benchmarks.naive_decoder import Naive
from hybridspec import embedded
from hybridspec.decoding.step import Step
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.tuning.workloads.sources import find_workload

DRAFT = embedded.DRAFTS[embedded.DEFAULT_DRAFT]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded.TARGET)(find_workload("json").prompts[0].text)["input_ids"]


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(embedded.TARGET, DRAFT)


def test_without_a_name_the_commands_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS) and "example:" in out
    assert main([]) == 2
    assert main(["specluative"]) == 2
    assert "did you mean speculative?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"example: python -m benchmarks {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speculative", "--k", "0"], "argument --k: must be at least 1, not 0"),
        (["speculative", "--repeats", "many"], "argument --repeats: a whole number is wanted, not 'many'"),
        (["plain", "--threads", "0"], "argument --threads: must be at least 1, not 0"),
        (["growth", "--axis", "width"], "argument --axis: invalid choice"),
        (["growth", "--values", "4"], "--values belong to one --axis"),
        (["growth", "--axis", "layers", "--values", "6"], "layers come in fours"),
        (["growth", "--axis", "hidden", "--values", "100"], "a multiple of 128"),
        (["tuner-oracle", "--rematches", "0"], "argument --rematches: must be at least 1, not 0"),
        (["embedded-pair", "--draft", "none"], "argument --draft: invalid choice"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plain", "--without-peers", "--target", str(tmp_path / "none")]) == 2
    assert "none: no such folder" in capsys.readouterr().err


def test_settings_tell_no_path_of_this_machine(tmp_path: Path) -> None:
    assert command.place(embedded.TARGET) == "hybridspec/embedded/target"
    assert command.place(tmp_path / "model") == "model"


@pytest.mark.parametrize("k", [1, 4])
def test_the_naive_way_decodes_what_ours_does_in_the_same_steps(ours: Ours, prompt: list[int], k: int) -> None:
    """Acceptance too: a stale state of the draft would not show in the output."""
    naive = Naive(embedded.TARGET, DRAFT).decode(prompt, 20, k)
    speculative_run = ours.decode(prompt, 20, k)
    assert naive.tokens == speculative_run.tokens == ours.decode(prompt, 20, 0).tokens
    steps = [(step.drafted, step.accepted) for step in naive.steps]
    assert steps == [(step.drafted, step.accepted) for step in speculative_run.steps]
    assert 0 < sum(accepted for _, accepted in steps) < sum(drafted for drafted, _ in steps)
    assert naive.timed_tokens == 20 and naive.wall_seconds > 0 and naive.prefill_seconds > 0


@pytest.mark.parametrize("kind", [Loop, StaticGenerate, CompiledLoop, CompiledGenerate])
def test_transformers_ways_decode_what_ours_does_more_than_once(
    ours: Ours, prompt: list[int], kind: type[Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is really compiled here: that takes minutes, and the caches are what could be wrong."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    way = kind(embedded.TARGET, DRAFT)
    way.decode(prompt[:5], 3, 0)
    found = way.decode(prompt, 8, 0)
    assert found.tokens == ours.decode(prompt, 8, 0).tokens
    assert found.timed_tokens == 7
    assert found.wall_seconds > 0 and found.prefill_seconds > 0


def test_every_block_length_is_compiled_before_the_clock_runs(
    ours: Ours, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling, which takes minutes: what has been fed by then is what counts."""
    monkeypatch.setattr(CompiledOurs, "options", {})
    way = CompiledOurs(embedded.TARGET, DRAFT)
    assert way.decode(prompt, 8, 2).tokens == ours.decode(prompt, 8, 2).tokens
    target, draft = way.target, way.draft.runner
    assert way.warm == {(target, 1), (target, 2), (target, 3), (draft, 1), (draft, 2)}


def test_a_stop_token_ends_the_naive_way(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    naive = Naive(embedded.TARGET, DRAFT)
    tokens = naive.decode(prompt, 12, 3).tokens
    stop = next(token for i, token in enumerate(tokens) if i > 4 and token not in tokens[:i])
    naive.target.model.generation_config.eos_token_id = stop
    assert naive.decode(prompt, 12, 3).tokens == tokens[: tokens.index(stop) + 1]


class HereWorker:
    """Stands in for a process of its own, which takes seconds to start."""

    def __init__(self, python: str, way: str, target: Path, draft: Path, threads: int) -> None:
        self.way = decoder_class(way)(target, draft)

    def __enter__(self) -> "HereWorker":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def versions(self) -> dict[str, str]:
        return {"torch": "here"}

    def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
        return self.way.decode(list(prompt), new_tokens, k)


def test_speculative_smoke_and_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(decoder_rounds, "Worker", HereWorker)
    assert main(["speculative", "--smoke", "--without-peers", "--k", "2", "--json", str(tmp_path / "s.json")]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert list(result["ways"]) == ["ours", "generate", "ours, K = 2", "naive, K = 2"]
    assert all(row["outputs_that_differ"] == 0 for row in result["ways"].values())
    assert result["ways"]["ours"]["speedup"] == 1
    assert not result["failed"] and not result["interrupted"]
    ratio = result["ratios"]["naive, each at its best K"]
    ways = result["ways"]
    assert ratio["ratio"] == pytest.approx(ways["ours, K = 2"]["speedup"] / ways["naive, K = 2"]["speedup"], rel=1e-4)
    assert {"processor", "cores", "threads", "torch", "transformers", "hybridspec", "commit"} <= set(result["machine"])
    assert result["settings"]["seed"] == 0 and result["load_average_at_start"] is not None
    assert "naive, K = 2" in capsys.readouterr().out
    assert main(["table", "--results", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "## speculative ([s.json](s.json))" in page and "| naive, K = 2 |" in page
    assert result["machine"]["processor"] in page
    assert main(["table", "--results", str(tmp_path), "--check"]) == 0
    (tmp_path / "README.md").write_text("old")
    assert main(["table", "--results", str(tmp_path), "--check"]) == 1


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_a_smoke_makes_no_environment_unless_one_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def make(folder: Path, **_: object) -> Path:
        raise peer_environment.EnvironmentNotMade(f"asked for {folder}")

    monkeypatch.setattr(peer_environment, "make", make)
    monkeypatch.setattr(decoder_rounds, "Worker", HereWorker)
    arguments = [name, "--smoke", "--way", "ours", "--way", "economize"]
    assert main(arguments) == 0
    assert "--peers FOLDER runs them" in capsys.readouterr().out
    assert main([*arguments, "--peers", str(tmp_path)]) == 1
    assert f"asked for {tmp_path}" in capsys.readouterr().err


def test_growth_smoke(tmp_path: Path) -> None:
    main(["growth", "--smoke", "--axis", "k", "--axis", "layers", "--json", str(tmp_path / "g.json")])
    result = json.loads((tmp_path / "g.json").read_text())
    (one, three), (four, eight) = result["axes"]["k"], result["axes"]["layers"]
    assert (one["sizes"]["k"], three["sizes"]["k"]) == (1, 3)
    assert eight["state_bytes"] == 2 * four["state_bytes"] == 6 * 128 * 128 * 4
    assert three["held_bytes"] > one["held_bytes"]
    assert all(part["median_milliseconds"] > 0 for part in eight["ours"].values())
    assert eight["naive"]["partial"]["median_milliseconds"] > eight["ours"]["partial"]["median_milliseconds"]
    assert len(growth.tables(result)) == 2


def test_growth_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(growth, "free_bytes", lambda: 2**20)
    main(["growth", "--smoke", "--axis", "hidden", "--json", str(tmp_path / "g.json")])
    result = json.loads((tmp_path / "g.json").read_text())
    assert result["axes"]["hidden"] == [] and list(result["left_out"]) == ["hidden 128", "hidden 256"]
    assert "are free" in growth.tables(result)[0].markdown()


@pytest.mark.parametrize(
    ("content", "message"), [("{", "no JSON"), ("[]", "'benchmark' names none"), ('{"benchmark": "x"}', "names none")]
)
def test_a_result_that_cannot_be_read_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "broken.json").write_text(content)
    assert main(["table", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "broken.json" in error and message in error


def test_no_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["table", "--results", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_the_page_in_the_repository_is_what_its_files_give() -> None:
    if not list(table.command.RESULTS.glob("*.json")):
        pytest.skip("no results yet")
    assert main(["table", "--check"]) == 0


def test_a_worker_says_what_it_cannot_do() -> None:
    missing = pytest.raises(WorkerFailed, match="ModuleNotFoundError: No module named 'economize'")
    with Worker(sys.executable, "economize", embedded.TARGET, DRAFT, 1) as worker, missing:
        worker.versions()


def test_an_entry_that_fails_leaves_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """``b`` fails in its second round, ``c`` at once; ``a`` is not disturbed, and pairs stay pairs."""

    class Fake:
        def __init__(self, python: str, way: str, *_: object) -> None:
            self.way, self.calls = way, 0

        def __enter__(self) -> "Fake":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def versions(self) -> dict[str, str]:
            if self.way == "c":
                raise WorkerFailed("nothing here")
            return {"torch": "1"}

        def decode(self, prompt: list[int], new_tokens: int, k: int) -> TimedGeneration:
            self.calls += 1
            if self.way == "b" and self.calls == 3:
                raise WorkerFailed("tired")
            return TimedGeneration([1, 2], [], 1.0 + self.calls, 1.0, prefill_seconds=0.1)

    monkeypatch.setattr(decoder_rounds, "Worker", Fake)
    entries = [Entry("a"), Entry("b"), Entry("c", 0, PEERS)]
    outcome = decoder_rounds.run_rounds(
        entries,
        [RoundPrompt(f"w/{i}", "w", (1, 2)) for i in range(2)],
        target=Path(),
        draft=Path(),
        pythons={"here": "", PEERS: ""},
        repeats=2,
        new_tokens=2,
        threads=1,
        seed=0,
        say=lambda _: None,
    )
    assert outcome.failed == {entries[1]: "tired", entries[2]: "nothing here"}
    assert [prompt.id for prompt, _ in outcome.runs[entries[0]]] == ["w/0", "w/1", "w/0", "w/1"]
    assert [run.wall_seconds for _, run in outcome.runs[entries[0]]] == [3, 4, 5, 6]


def test_ratios_compare_each_at_its_best_length() -> None:
    """Ours is best at K = 2, the other at K = 4: 3 / 1.5 times as many tokens a second; at K = 4 it is 2 / 1.5."""
    speeds = {
        decoder_comparison.REFERENCE: 1.0,
        Entry("ours", 2): 3.0,
        Entry("ours", 4): 2.0,
        Entry("economize", 2, PEERS): 1.2,
        Entry("economize", 4, PEERS): 1.5,
    }
    prompts = [RoundPrompt(f"w/{i}", "w", (1,)) for i in range(3)]

    def run(entry: Entry) -> TimedGeneration:
        seconds = 10 / speeds[entry]
        return TimedGeneration([1] * 10, [Step(entry.k, 1)] * 5 if entry.k else [], seconds, seconds)

    runs = {entry: [(prompt, run(entry)) for prompt in prompts] for entry in speeds}
    outcome = Outcome(runs, warm_up_seconds=dict.fromkeys(runs, 0.0))
    found = decoder_comparison.report(outcome)
    best = found["ratios"]["economize (peers' environment), each at its best K"]
    assert (best["ours"], best["theirs"]) == ("ours, K = 2", "economize (peers' environment), K = 4")
    assert best["ratio"] == pytest.approx(2) and best["interval_90"] == pytest.approx((2, 2))
    assert found["ratios"]["economize (peers' environment), K = 4"]["ratio"] == pytest.approx(4 / 3)
    found |= {"settings": {"workload": ["w"], "new_tokens": 10, "repeats": 1, "threads": 1}, "rounds": 3}
    assert "2.00 (2.00 to 2.00)" in "\n".join(grid.markdown() for grid in speculative.tables(found))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["peers", "--peers", str(tmp_path)]) == 1
    assert "holds files of something else" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_the_environment_is_made_once_and_says_why_it_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = tmp_path / "peers", []

    def create(where: Path, with_pip: bool) -> None:
        Path(sysconfig.get_path("purelib", "venv", {"base": str(where), "platbase": str(where)})).mkdir(parents=True)
        (where / "pyvenv.cfg").touch()

    def pip(words: list[str], **_: object) -> SimpleNamespace:
        calls.append(words)
        return SimpleNamespace(returncode=len(calls) == 1, stderr="no such package")

    monkeypatch.setattr(peer_environment.venv, "create", create)
    monkeypatch.setattr(peer_environment.subprocess, "run", pip)
    with pytest.raises(peer_environment.EnvironmentNotMade, match="(?s)no such package.*--without-peers"):
        peer_environment.make(folder, ["economize==1"], say=lambda _: None)
    assert not (folder / peer_environment.MADE).exists()
    for packages in (["economize==1"], ["economize==1"], ["economize==2"]):
        peer_environment.make(folder, packages, say=lambda _: None)
    assert [words[-1] for words in calls] == ["economize==1", "economize==1", "economize==2"]
    (pth,) = folder.rglob("*.pth")
    assert sysconfig.get_path("purelib") in pth.read_text()


def test_markdown_escapes_bars() -> None:
    grid = Grid("t", ("", "a|b"), [["x", "1|2"]], ["A note."])
    assert grid.markdown() == "**t**\n\n|  | a\\|b |\n| --- | ---: |\n| x | 1\\|2 |\n\nA note."


def test_medians_and_their_interval() -> None:
    from benchmarks.intervals import ratio_of_medians, summary

    assert summary([0.001, 0.002, 0.004]) == pytest.approx(
        {"median_milliseconds": 2.0, "quartile_1": 1.5, "quartile_3": 3.0}
    )
    ratio, (low, high) = ratio_of_medians([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
    assert low <= ratio == 2.0 <= high and low < high
