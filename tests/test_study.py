"""The study of one workload on a tiny pair: what it measures, how it resumes, and that an interrupt loses nothing."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import InputError, SessionError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.backends.base import Sample
from hybridspec.tuning.backends.torch_backend import TorchBackend
from hybridspec.tuning.config import StudySettings
from hybridspec.tuning.configuration import PLAIN, Bench, Configuration
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_building import build_profile
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import WorkloadStudy, search_space
from hybridspec.tuning.timed_decoding import check_tie
from hybridspec.tuning.workloads.encoding import EncodedPrompt
from hybridspec.tuning.workloads.sources import Prompt
from tests.tiny import tiny_model

PROMPTS = (EncodedPrompt(Prompt("p0"), (5, 6, 7, 8)), EncodedPrompt(Prompt("p1"), (9, 10, 11)))
SETTINGS = StudySettings(max_k=3, prompts=2, max_new_tokens=8, trials=10, seconds=None, keep_going=True)
SPACE = search_space(["self"], [], 3)


@pytest.fixture
def target() -> TargetRunner:
    return TargetRunner(tiny_model())


def make_study(target: TargetRunner, out: Path, **changes: object) -> WorkloadStudy:
    settings = SETTINGS.replaced(**changes)
    bench = Bench(target, drafts={"self": SameArchitectureDraft(target)})
    backend = TorchBackend(bench, PROMPTS, max_k=settings.max_k, max_new_tokens=settings.max_new_tokens)
    return WorkloadStudy("tiny", backend, SPACE, settings, open_storage(out), "tiny pair")


def test_every_configuration_is_measured_once_and_self_draft_is_always_accepted(
    target: TargetRunner, tmp_path: Path
) -> None:
    result = make_study(target, tmp_path).run()
    assert set(result.samples) | set(result.pruned) == set(SPACE) - {PLAIN}
    assert result.stopped == "every configuration was measured"
    for configuration, measurement in result.measurements.items():
        assert measurement.acceptance_rate == 1.0
        assert measurement.interval[0] <= measurement.speedup <= measurement.interval[1]
        assert measurement.tokens == 16
        assert max(d for s in result.samples[configuration] for d, _ in s.steps) <= int(configuration.length)
    assert set(result.survey.predicted) == set(SPACE)
    assert result.survey.drafts["self"].accepted == result.survey.drafts["self"].drafted


def test_second_run_measures_nothing_again(
    target: TargetRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_study(target, tmp_path).run()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(TorchBackend, "measure", refuse)
    monkeypatch.setattr(TorchBackend, "survey", refuse)
    assert make_study(target, tmp_path).run() == first


def test_interrupt_keeps_what_was_measured_and_the_next_run_goes_on(
    target: TargetRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TorchBackend.measure, []

    def interrupted(
        self: TorchBackend, configuration: Configuration, on_sample: Callable, more: bool = False
    ) -> list[Sample]:
        calls.append(configuration)

        def stop(index: int, sample: Sample) -> None:
            if len(calls) == 2 and index == 1:
                raise KeyboardInterrupt
            on_sample(index, sample)

        return real(self, configuration, stop)

    monkeypatch.setattr(TorchBackend, "measure", interrupted)
    study = make_study(target, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    kept = study.result().samples
    assert len(kept) + len(study.result().pruned) == 1
    assert study.result().stopped is None
    monkeypatch.setattr(TorchBackend, "measure", real)
    resumed = make_study(target, tmp_path).run()
    assert len(resumed.samples) + len(resumed.pruned) == 3
    assert all(resumed.samples[c] == s for c, s in kept.items())


def test_other_settings_are_another_study(target: TargetRunner, tmp_path: Path) -> None:
    make_study(target, tmp_path).run()
    assert make_study(target, tmp_path, max_new_tokens=6).result().survey is None
    assert make_study(target, tmp_path, trials=1).result().survey is not None


@pytest.mark.parametrize("change", [{"longest": 0}, {"prompts": 0}, {"max_new_tokens": 1}, {"trials": 0}])
def test_settings_out_of_range_are_named(change: dict) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        StudySettings(**change)


def test_profile_round_trip_and_merge(target: TargetRunner, tmp_path: Path) -> None:
    result = make_study(target, tmp_path).run()
    drafts = {"self": SameArchitectureDraft(target)}
    profile = build_profile(target, drafts, SETTINGS, [result], threads=1)
    profile.save(tmp_path)
    assert Profile.load(tmp_path).to_dict() == json.loads(json.dumps(profile.to_dict()))
    row = Profile.load(tmp_path)["workloads"]["tiny"]
    assert row["acceptance"]["self"]["by_position"] == [1.0, 1.0, 1.0]
    # Another workload joins, an unfinished repetition of a finished one changes nothing.
    other = dataclasses.replace(result, name="other")
    build_profile(target, drafts, SETTINGS, [other], threads=1).save(tmp_path)
    empty = dataclasses.replace(result, samples={}, measurements={}, pruned=(), stopped=None)
    build_profile(target, drafts, SETTINGS, [empty], threads=1).save(tmp_path)
    merged = Profile.load(tmp_path)["workloads"]
    assert set(merged) == {"tiny", "other"}
    assert merged["tiny"] == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(schema=1), "field schema is 1"),
        (lambda p: p.pop("target"), "'target' is a required property"),
        (lambda p: p["workloads"]["tiny"].update(best_k=-1), r"workloads\.tiny\.best_k"),
        (lambda p: p["workloads"]["tiny"].update(trials={}), r"workloads\.tiny\.trials"),
    ],
)
def test_a_profile_that_does_not_fit_the_schema_is_named(
    target: TargetRunner, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    result = make_study(target, tmp_path, trials=1).run()
    profile = build_profile(target, {"self": SameArchitectureDraft(target)}, SETTINGS, [result], threads=1)
    profile = profile.to_dict()
    change(profile)
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    with pytest.raises(InputError, match=message):
        Profile.load(tmp_path)


def test_a_broken_or_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"profile\.json: cannot be read"):
        Profile.load(tmp_path)
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        Profile.load(tmp_path)


def test_a_broken_study_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(InputError, match=r"study\.db"):
        open_storage(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="out"):
        open_storage(tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "margin", "tie"),
    [
        (torch.float32, 5e-4, True),
        (torch.float32, 2e-3, False),
        (torch.bfloat16, 0.125, True),
        (torch.bfloat16, 0.5, False),
    ],
)
def test_outputs_may_part_at_a_tie_of_the_logits_type(dtype: torch.dtype, margin: float, tie: bool) -> None:
    logits = torch.tensor([[0.0, 0.0, margin]], dtype=dtype)
    session = SimpleNamespace(verify=lambda block: logits.expand(len(block), -1))
    prompt = SimpleNamespace(id="p0", tokens=[5], session=session, rewind=lambda: None)
    with nullcontext() if tie else pytest.raises(SessionError, match="prompt p0: .* at token 1"):
        check_tie(prompt, [0, 1, 0], [0, 2, 0])
