"""``python -m benchmarks draft-length`` at its smallest: what it measures of each way, and against what."""

import json
from pathlib import Path

import pytest

from benchmarks import draft_length


def test_rules_are_measured_against_the_best_fixed_length(tmp_path: Path) -> None:
    path = tmp_path / "draft_length.json"
    sizes = ["--prompts", "1", "--new-tokens", "10", "--repeats", "1", "--k", "2"]
    draft_length.main([*sizes, "--rules", "expected-gain", "svip", "--json", str(path)])
    result = json.loads(path.read_text())
    assert list(result["halves"]) == ["first: json", "second: prose"]
    for ways in result["halves"].values():
        assert list(ways) == ["0", "2", "expected-gain", "svip"]
        assert [name for name, way in ways.items() if way["fixed"]] == ["0", "2"]
        (best,) = [way for way in ways.values() if way["best_fixed"]]
        assert best["fixed"] and best["cpu"]["ratio_to_best_fixed"] == 1
        assert best["cpu"]["speedup"] == max(way["cpu"]["speedup"] for way in ways.values() if way["fixed"])
        assert not any(way["outputs_that_differ"] for way in ways.values())
        for way in ways.values():
            low, high = way["cpu"]["interval_90"]
            assert 0 < low <= way["cpu"]["speedup"] <= high
            assert way["cpu"]["ratio_to_best_fixed"] == pytest.approx(
                way["cpu"]["speedup"] / best["cpu"]["speedup"], rel=1e-4
            )
        assert ways["0"]["drafted_per_step"] == 0 and ways["2"]["drafted_per_step"] > 1


def test_a_rule_lives_through_the_whole_stream_and_is_new_in_each_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from rich.console import Console

    from hybridspec.decoding.draft_length import DraftLength
    from hybridspec.decoding.options import DecodeOptions
    from hybridspec.decoding.target import EngineTarget
    from hybridspec.decoding.timed_generation import TimedGeneration
    from hybridspec.tuning.workloads.sources import Prompt

    seen: list[tuple[str, DraftLength]] = []

    class Prepared:
        def __init__(self, target: object, draft: object, name: str, *_: object) -> None:
            self.id = name

        def __enter__(self) -> "Prepared":
            return self

        def __exit__(self, *_: object) -> None:
            return

        def begin(self, decode: DecodeOptions) -> SimpleNamespace:
            if decode.length.name == "expected-gain":
                seen.append((self.id, decode.length))
            return SimpleNamespace(advance=lambda _: False, result=TimedGeneration([1], [], 1.0, 1.0))

    monkeypatch.setattr(draft_length, "PreparedPrompt", Prepared)
    prompts = {half: [Prompt(f"{half} {i}", "x") for i in range(2)] for half in ("a", "b")}
    target = EngineTarget("target", 2, lambda text: {"input_ids": [1]})
    options = SimpleNamespace(k=[1], rules=["expected-gain", "bandit"], repeats=2, new_tokens=1, seed=0)
    halves = draft_length.run_stream(target, None, prompts, options, Console(quiet=True))
    assert [name for name, _ in seen] == 2 * ["a 0", "a 1", "b 0", "b 1"]
    assert [rule is seen[0][1] for _, rule in seen] == 4 * [True] + 4 * [False]
    assert {name: len(runs) for name, runs in halves["b"].items()} == {"0": 4, "1": 4, "expected-gain": 4, "bandit": 4}
