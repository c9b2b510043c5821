"""A profile as frames: every configuration once, numbers where they are known."""

import pytest

from hybridspec.tuning.reporting.frames import acceptance_frame, configurations_frame, costs_frame
from tests.profiles import DRAFTS, LONGEST, profile, unmeasured, workload


def test_every_configuration_is_one_row_with_what_is_known_of_it() -> None:
    frame = configurations_frame(profile({"a": workload(1.5), "b": workload(0.8)}))
    assert not frame.duplicated(["workload", "label"]).any()
    assert len(frame) == 2 * len(DRAFTS) * (LONGEST + 2)
    best = frame.query("workload == 'a' and chosen").squeeze()
    assert (best.draft, best.length) == (DRAFTS[0], "2")
    assert (best.speedup, best.speedup_low, best.speedup_high) == (1.5, 1.4, 1.6)
    assert best.predicted == pytest.approx(1.24)
    # Plain decoding was chosen on b, and is no configuration that was tried.
    assert not frame.query("workload == 'b'").chosen.any()
    assert frame.pruned.sum() == 2
    assert frame[frame.pruned].speedup.isna().all()
    assert frame.speedup.notna().sum() == 4


def test_acceptance_and_costs_by_position_and_length() -> None:
    one = profile({"a": workload(1.5, share=0.5)})
    acceptance = acceptance_frame(one).set_index(["draft", "position"]).accepted
    assert acceptance[DRAFTS[1], 3] == 0.125
    costs = costs_frame(one).set_index(["draft", "k"])
    assert len(costs) == len(DRAFTS) * (LONGEST + 1)
    step = costs.loc[(DRAFTS[0], 2)]
    assert step.step_cost == pytest.approx(2 * 0.1 + (0.9 + 0.16) + 0.15)
    assert step.tokens == pytest.approx(1 + 0.5 + 0.25)


def test_a_workload_without_a_survey_has_no_rows() -> None:
    none = profile({"a": unmeasured()})
    assert [len(make(none)) for make in (configurations_frame, acceptance_frame, costs_frame)] == [0, 0, 0]
