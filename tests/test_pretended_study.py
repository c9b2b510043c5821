"""How a study chooses: on a backend whose truth is known."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridspec.tuning.backends.base import Backend, DraftSurvey, Progress, Sample, Survey
from hybridspec.tuning.config import StudySettings
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.decision import decide, shared_speedups
from hybridspec.tuning.storage import open_storage
from hybridspec.tuning.study import WorkloadStudy, search_space


class Pretended(Backend):
    """An engine whose speed-ups are known: what a study makes of them."""

    name = "torch"

    def __init__(
        self,
        truth: dict[str, float],
        predicted: dict[str, float] | None = None,
        delay: float = 0.0,
        spread: float = 0.01,
        more: int = 0,
    ) -> None:
        self.truth, self.predicted, self.delay = truth, predicted or truth, delay
        self.spread, self.more = spread, more
        self.measured: list[Configuration] = []
        self.settled: list[Configuration] = []

    def survey(self, configurations: list[Configuration], progress: Progress) -> Survey:
        drafts = {c.draft: DraftSurvey([4], [2], 0.1) for c in configurations if not c.plain}
        values = {c: 1.0 if c.plain else self.predicted[c.length] for c in configurations}
        return Survey(1.0, [1.0] * 9, {d: 0.0 for d in drafts}, drafts, values)

    def measure(
        self, configuration: Configuration, on_sample: Callable[[int, Sample], None], more: bool = False
    ) -> list[Sample]:
        (self.settled if more else self.measured).append(configuration)
        samples = []
        for i in range(3, 3 + self.more) if more else range(3):
            time.sleep(self.delay)
            # Prompts differ, and every run strays a little, always alike.
            pace = 1 + self.spread * ((i + int(configuration.length)) % 3 - 1) * (i < 3)
            seconds = 10.0 / self.truth[configuration.length] * pace
            samples.append(Sample(f"p{i}", 10.0, 10.0, 10, seconds, seconds, 10, ((2, 1),), 0.1, 1.0))
            on_sample(len(samples) - 1, samples[-1])
        return samples


def pretended_study(backend: Backend, out: Path, storage: str | None = None, **changes: object) -> WorkloadStudy:
    settings = StudySettings(**({"max_k": 4, "trials": 10, "seconds": None} | changes))
    return WorkloadStudy("known", backend, search_space(["d"], [], 4), settings, open_storage(out, storage), "known")


def samples(speedups: list[float]) -> list[Sample]:
    return [Sample(f"p{i}", 10, 10, 10, 10 / s, 10 / s, 10) for i, s in enumerate(speedups)]


def lengths(backend: Pretended) -> list[str]:
    return [c.length for c in backend.measured]


def test_the_best_predicted_comes_first_and_ends_the_study_when_nothing_else_can_win(tmp_path: Path) -> None:
    backend = Pretended({"1": 1.2, "2": 1.5, "3": 1.4, "4": 1.3})
    result = pretended_study(backend, tmp_path).run()
    assert lengths(backend) == ["2"]
    assert result.answer.configuration.length == "2"
    assert result.stopped == "no untried configuration can win by more than 2%"


def test_a_wrong_prediction_makes_it_look_further(tmp_path: Path) -> None:
    """K = 4 was predicted best and came out worst: those that it was preferred to are tried."""
    backend = Pretended({"1": 1.2, "2": 1.5, "3": 1.4, "4": 0.8}, {"1": 1.2, "2": 1.5, "3": 1.45, "4": 1.6})
    result = pretended_study(backend, tmp_path).run()
    assert lengths(backend)[:2] == ["4", "2"]
    assert result.answer.configuration.length == "2"


def test_a_gain_inside_the_noise_is_settled_by_further_prompts(tmp_path: Path) -> None:
    """A gain of 10 % with prompts that stray by 30 %: three prompts say nothing, twelve do."""
    truth = {"1": 1.0, "2": 1.1, "3": 1.0, "4": 1.0}
    assert pretended_study(Pretended(truth, spread=0.3), tmp_path / "few").run().answer.configuration == PLAIN
    backend = Pretended(truth, spread=0.3, more=9)
    study = pretended_study(backend, tmp_path / "more")
    result = study.run()
    assert [c.length for c in backend.settled] == ["2"]
    assert result.answer.configuration.length == "2" and result.answer.configuration in result.samples
    assert len({s.prompt for s in result.samples[backend.settled[0]]}) == 12
    # All of it is in the storage: nothing is measured again.
    again = Pretended(truth, spread=0.3, more=9)
    assert pretended_study(again, tmp_path / "more").run().samples == result.samples
    assert not again.measured and not again.settled


def test_further_prompts_that_were_interrupted_are_measured_in_the_next_sitting(tmp_path: Path) -> None:
    truth = {"1": 1.0, "2": 1.1, "3": 1.0, "4": 1.0}

    class Interrupted(Pretended):
        def measure(self, configuration, on_sample, more=False):
            if more:
                raise KeyboardInterrupt
            return super().measure(configuration, on_sample, more)

    with pytest.raises(KeyboardInterrupt):
        pretended_study(Interrupted(truth, spread=0.3, more=9), tmp_path).run()
    backend = Pretended(truth, spread=0.3, more=9)
    result = pretended_study(backend, tmp_path).run()
    assert not backend.measured and [c.length for c in backend.settled] == ["2"]
    assert result.answer.configuration.length == "2"


def test_a_sure_gain_is_not_given_up_for_a_larger_one_inside_the_noise() -> None:
    sure, doubtful = Configuration("d", "2"), Configuration("e", "8")
    answer = decide({sure: samples([1.21, 1.22, 1.24]), doubtful: samples([0.9, 0.9, 9.0])})
    assert answer.configuration == sure
    assert "e K=8 may not" in answer.reason


def test_a_clear_answer_needs_no_further_prompts(tmp_path: Path) -> None:
    backend = Pretended({"1": 1.2, "2": 1.5, "3": 1.4, "4": 1.3}, more=9)
    pretended_study(backend, tmp_path / "gain").run()
    assert not backend.settled
    backend = Pretended({"1": 0.99, "2": 0.98, "3": 0.97, "4": 0.96}, more=9)
    pretended_study(backend, tmp_path / "loss").run()
    assert not backend.settled


def test_configurations_are_compared_on_the_prompts_that_both_decoded() -> None:
    slow, fast = Configuration("d", "1"), Configuration("d", "2")
    # The slower one was lucky with a further prompt of its own.
    measured = {slow: samples([1.2, 1.2, 9.0]), fast: samples([1.4, 1.4])}
    assert shared_speedups(measured) == pytest.approx({slow: 1.2, fast: 1.4})
    assert decide(measured).configuration == fast


def test_nothing_pays(tmp_path: Path) -> None:
    result = pretended_study(Pretended({"1": 0.9, "2": 0.8, "3": 0.7, "4": 0.6}), tmp_path).run()
    assert result.answer.configuration == PLAIN
    assert "K=1" in result.answer.reason


def test_everything_is_so_slow_that_it_is_abandoned(tmp_path: Path) -> None:
    result = pretended_study(Pretended({"1": 0.5, "2": 0.5, "3": 0.5, "4": 0.5}), tmp_path).run()
    assert result.answer.configuration == PLAIN
    assert "more than 10 % slower" in result.answer.reason


def test_limits_end_a_study_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    truth = {"1": 1.2, "2": 1.21, "3": 1.22, "4": 1.23}
    backend = Pretended(truth)
    result = pretended_study(backend, tmp_path, trials=2, keep_going=True).run()
    assert result.stopped == "the limit of 2 trials"
    result = pretended_study(backend, tmp_path, trials=3, keep_going=True).run()
    assert result.stopped == "the limit of 3 trials"
    assert lengths(backend) == ["4", "3", "2"]
    slow = Pretended(truth, delay=0.1)
    result = pretended_study(slow, tmp_path / "slow", seconds=0.5, keep_going=True).run()
    assert "time limit" in result.stopped
    assert 2 <= len(slow.measured) < 4


def test_a_hopeless_trial_is_pruned(tmp_path: Path) -> None:
    backend = Pretended({"1": 1.2, "2": 1.5, "3": 0.7, "4": 0.6})
    result = pretended_study(backend, tmp_path, keep_going=True).run()
    assert {c.length for c in result.pruned} == {"1", "3", "4"}
    assert {c.length for c in result.samples} == {"2"}


WORKER = """
import sys
from pathlib import Path
from tests.test_pretended_study import Pretended, pretended_study
truth = {str(k): 1 + 0.1 * k for k in range(1, 5)}
backend = Pretended(truth, delay=float(sys.argv[2]))
pretended_study(backend, Path(sys.argv[1]), sys.argv[3] or None, keep_going=True).run()
print(",".join(c.length for c in backend.measured))
"""


def worker(out: Path, delay: float, storage: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", WORKER, str(out), str(delay), storage]
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.parametrize("storage", ["", pytest.param("journal", marks=pytest.mark.slow)])
def test_two_workers_share_one_study(tmp_path: Path, storage: str) -> None:
    url = str(tmp_path / "journal.log") if storage else ""
    # The survey first, as the command does before it starts others.
    pretended_study(
        Pretended({str(k): 1 + 0.1 * k for k in range(1, 5)}), tmp_path, url or None, keep_going=True
    ).prepare()
    first, second = worker(tmp_path, 0.5, url), worker(tmp_path, 0.5, url)
    done = [w.communicate(timeout=120)[0].strip().split(",") for w in (first, second)]
    assert sorted(filter(None, done[0] + done[1])) == ["1", "2", "3", "4"], "each configuration by one worker"
    result = pretended_study(Pretended({}), tmp_path, url or None, keep_going=True).result()
    assert len(result.samples) + len(result.pruned) == 4


def test_a_killed_study_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the middle of a trial: none that had finished is lost, none is repeated."""
    process = worker(tmp_path, 0.4)
    truth = {str(k): 1 + 0.1 * k for k in range(1, 5)}
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.3)
        if (tmp_path / "study.db").exists():
            study = pretended_study(Pretended(truth), tmp_path, keep_going=True)
            if len(study.result().samples) + len(study.result().pruned) >= 1:
                break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = study.result()
    backend = Pretended(truth)
    resumed = pretended_study(backend, tmp_path, keep_going=True).run()
    before = {*kept.samples, *kept.pruned}
    assert before
    assert len({*resumed.samples, *resumed.pruned}) == 4
    assert not before & set(backend.measured)
    assert all(resumed.samples[c] == s for c, s in kept.samples.items())
