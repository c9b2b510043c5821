"""The study of one workload on a tiny pair: what it measures, how it resumes, and that an interrupt loses nothing."""

from pathlib import Path

import pytest

import hybridspec.tuning.study as study_module
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import HybridspecError, InputError
from hybridspec.runner import TargetRunner
from hybridspec.tuning.cost_model import Costs, acceptance_length, ideal_speedup, predicted_speedup
from hybridspec.tuning.profile import build_profile, write_profile
from hybridspec.tuning.study import Settings, WorkloadStudy, open_storage
from hybridspec.tuning.trial import Pair, Run, speedup, speedup_interval
from hybridspec.tuning.workloads import Prompt, Workload
from tests.tiny import tiny_model

WORKLOAD = Workload("tiny", (Prompt("p0", "5 6 7 8"), Prompt("p1", "9 10 11")))
SETTINGS = Settings(longest=3, prompts=2, max_new_tokens=8, trials=4)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[TargetRunner, SameArchitectureDraft]:
    monkeypatch.setattr(TargetRunner, "encode", lambda self, text: numbers(text))
    return TargetRunner(tiny_model()), SameArchitectureDraft(TargetRunner(tiny_model()))


def make_study(pair: tuple[TargetRunner, SameArchitectureDraft], out: Path, **changes: object) -> WorkloadStudy:
    settings = Settings(**{**vars(SETTINGS), **changes})
    return WorkloadStudy(*pair, WORKLOAD, settings, open_storage(out), "tiny pair")


def test_every_draft_length_is_measured_once_and_self_draft_is_always_accepted(pair: tuple, tmp_path: Path) -> None:
    result = make_study(pair, tmp_path).run()
    assert sorted(result.measurements) == [0, 1, 2, 3]
    assert result.complete
    for k, measurement in result.measurements.items():
        assert measurement.acceptance_rate == (1.0 if k else None)
        assert measurement.interval[0] <= measurement.speedup <= measurement.interval[1]
        assert measurement.tokens == 16
    assert set(result.predicted) == {0, 1, 2, 3}


def test_second_run_measures_nothing_again(pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_study(pair, tmp_path).run()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(study_module, "measure_pair", refuse)
    assert make_study(pair, tmp_path).run() == first


def test_interrupt_keeps_what_was_measured_and_the_next_run_goes_on(
    pair: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = study_module.measure_pair, []

    def interrupted(*arguments: object, **options: object) -> Pair:
        calls.append(1)
        if len(calls) == 4:  # the second prompt of the second trial
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(study_module, "measure_pair", interrupted)
    study = make_study(pair, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    kept = study.result().measurements
    assert len(kept) == 1
    assert not study.result().complete
    monkeypatch.setattr(study_module, "measure_pair", real)
    resumed = make_study(pair, tmp_path).run()
    assert len(resumed.measurements) == 4
    assert all(resumed.measurements[k] == m for k, m in kept.items())


def test_a_killed_process_does_not_block_the_next(pair: tuple, tmp_path: Path) -> None:
    study = make_study(pair, tmp_path)
    study.study.ask()
    assert sorted(make_study(pair, tmp_path).run().measurements) == [0, 1, 2, 3]


def test_other_settings_are_another_study(pair: tuple, tmp_path: Path) -> None:
    make_study(pair, tmp_path).run()
    assert make_study(pair, tmp_path, max_new_tokens=6).result().measurements == {}


def test_a_prompt_beyond_the_context_is_named_before_anything_runs(pair: tuple, tmp_path: Path) -> None:
    with pytest.raises(HybridspecError, match="workload tiny, prompt p0"):
        make_study(pair, tmp_path, max_new_tokens=10**6).check()


@pytest.mark.parametrize("change", [{"longest": 0}, {"prompts": 0}, {"max_new_tokens": 1}, {"trials": 0}])
def test_settings_out_of_range_are_named(change: dict) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        Settings(**change)


def test_profile_round_trip(pair: tuple, tmp_path: Path) -> None:
    result = make_study(pair, tmp_path).run()
    target, draft = pair
    profile = build_profile(target, draft.runner, SETTINGS, [result], threads=1)
    stale = tmp_path / "speculative-config-tiny.json"
    stale.write_text("old")
    write_profile(profile, tmp_path)
    assert stale.exists() == bool(result.best_k)
    assert profile["workloads"]["tiny"]["best_k"] == result.best_k
    if result.best_k:
        assert f'"num_speculative_tokens": {result.best_k}' in stale.read_text()


def run_of(tokens: int, seconds: float) -> Run:
    return Run(list(range(tokens)), [], seconds, seconds)


def test_speedup_pools_time_per_token() -> None:
    pairs = [Pair("a", run_of(10, 4.0), run_of(20, 4.0)), Pair("b", run_of(10, 4.0), run_of(20, 4.0))]
    assert speedup(pairs) == pytest.approx(2.0)
    assert speedup_interval(pairs) == pytest.approx((2.0, 2.0))


def test_cost_model_by_hand() -> None:
    costs = Costs(target_step=1.0, draft_step=0.1, verify=(1.0, 1.1, 1.2), rollback=0.05)
    assert acceptance_length([0.8, 0.6], 2) == pytest.approx(2.4)
    assert predicted_speedup([0.8, 0.6], costs, 2) == pytest.approx(2.4 / (0.2 + 1.2 + 0.05))
    assert ideal_speedup(2.4, costs, 2) == pytest.approx(2.4 / 1.4)
    assert predicted_speedup([0.8, 0.6], costs, 0) == 1.0


def test_one_prompt_never_wins() -> None:
    """A bootstrap over one prompt has no width."""
    assert speedup_interval([Pair("a", Run([1] * 8, [], 4.0, 4.0), Run([1] * 8, [], 2.0, 2.0))]) == (1.0, 2.0)


def test_a_broken_study_file_is_named(pair: tuple, tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match=r"study\.db"):
        make_study(pair, tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out"):
        open_storage(tmp_path / "out")
