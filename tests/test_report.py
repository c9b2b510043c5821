"""Reports: what plots, page, tables and the command show, and that they show what the profile holds."""

import json
from collections.abc import Callable

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from hybridspec.tuning.reporting.acceptance import acceptance_figure
from hybridspec.tuning.reporting.against import compare_profiles
from hybridspec.tuning.reporting.against_plot import against_figure
from hybridspec.tuning.reporting.costs import best_ratio, cost_figure, shown_draft, step_costs
from hybridspec.tuning.reporting.figures import COLOURS, looks
from hybridspec.tuning.reporting.page import report_page
from hybridspec.tuning.reporting.speedup import rule_labels, speedup_figure
from tests.profiles import DRAFTS, profile, unmeasured, workload
from tests.report_runs import EIGHT, typed

FIGURES = (acceptance_figure, speedup_figure, cost_figure)


# Plots


def test_acceptance_lines_are_the_profile_numbers() -> None:
    content = profile({"json": workload()})
    lines = [
        line
        for line in acceptance_figure(content).axes[0].get_lines()
        if line.get_marker() not in ("None", "", None) and len(line.get_ydata()) > 1
    ]
    expected = [content["workloads"]["json"]["acceptance"][draft]["by_position"] for draft in DRAFTS]
    assert [list(line.get_ydata()) for line in lines] == expected
    assert [to_hex(line.get_color()).upper() for line in lines] == list(COLOURS[:3])


def test_speedup_shows_every_prediction_and_trial() -> None:
    content = profile({"json": workload(1.5)})
    row = content["workloads"]["json"]
    ax = speedup_figure(content).axes[0]
    heights = {float(y) for line in ax.get_lines() for y in line.get_ydata()}
    assert heights >= {entry["speedup"] for entry in row["predicted"]}
    assert heights >= {entry["speedup"] for entry in row["trials"] if not entry["pruned"]}
    markers = [line.get_marker() for line in ax.get_lines()]
    assert markers.count("x") == sum(entry["pruned"] for entry in row["trials"]) == 1
    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert labels[:3] == ["0", "1", "2"] and labels[-2:] == ["expected-gain", "svip"]
    ring = next(line for line in ax.get_lines() if line.get_markersize() == 11)
    assert list(ring.get_ydata()) == [1.5]


def test_the_legend_shows_points_of_measured_drafts_only_and_rules_go_by_their_names() -> None:
    row = workload(1.5)
    for entry in (*row["predicted"], *row["trials"]):
        if entry["length"] in ("expected-gain", "svip"):
            entry["length"] += ":longest=6"
    figure = speedup_figure(profile({"json": row}))
    measured = {t["draft"] for t in row["trials"] if t.get("speedup")}
    shown = [handle.get_marker() for handle in figure.legends[0].legend_handles[: len(DRAFTS)]]
    assert [marker != "" for marker in shown] == [draft in measured for draft in DRAFTS]
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels[-2:] == ["expected-gain", "svip"]
    assert rule_labels(["svip:longest=6", "svip:longest=2"]) == {r: r for r in ("svip:longest=6", "svip:longest=2")}


def test_cost_bars_add_up_and_the_line_is_the_acceptance_length() -> None:
    content = profile({"json": workload()})
    ax = cost_figure(content).axes[0]
    tops: dict[float, float] = {}
    for bar in ax.patches:
        tops[round(bar.get_x() + bar.get_width() / 2)] = bar.get_y() + bar.get_height()
    assert tops[0] == pytest.approx(1.0)
    for k in range(1, 9):
        assert tops[k] == pytest.approx(0.1 * k + 0.9 + 0.08 * k + 0.15)
    tokens = list(ax.get_lines()[0].get_ydata())
    assert tokens == pytest.approx([1 + sum(0.7**i for i in range(1, k + 1)) for k in range(9)])
    row = content["workloads"]["json"]
    ratios = [1.0, *(tokens[k] / tops[k] for k in range(1, 9))]
    assert best_ratio(*step_costs(typed(row), DRAFTS[0])) == pytest.approx((ratios.index(max(ratios)), max(ratios)))


def test_costs_show_the_best_predicted_draft_where_plain_decoding_wins() -> None:
    row = workload(0.8)
    for entry in row["predicted"]:
        entry["speedup"] = 0.9 if entry["draft"] == DRAFTS[1] else 0.5
    assert shown_draft(typed(row)) == DRAFTS[1]
    assert shown_draft(typed(unmeasured())) is None


@pytest.mark.parametrize("draw", FIGURES)
@pytest.mark.parametrize("workloads", [{"json": workload()}, EIGHT], ids=["1", "8"])
def test_no_text_meets_text(draw: Callable[[dict], Figure], workloads: dict) -> None:
    assert_readable(draw(profile(workloads)))


def test_names_of_any_kind_are_readable() -> None:
    drafts = ("_odd$a$", "/models/" + "deep/" * 20 + "Qwen3.5-0.8B", *(f"name-{'x' * 50}-{i}" for i in range(6)))
    workloads = {"/data/" + "long/" * 30 + "$x^2$.jsonl": workload(drafts=drafts), "[red]": workload(drafts=drafts)}
    for draw in FIGURES:
        assert_readable(draw(profile(workloads, drafts)))


def assert_readable(figure: Figure) -> None:
    """Every text lies inside the figure, and header, titles, ticks, axis labels and legend keep clear of each other."""
    figure.draw_without_rendering()
    drawn = {text: True for text in figure.findobj(Text) if text.get_text().strip()}
    for ax in figure.axes:
        drawn |= dict.fromkeys(ax.findobj(Text), False) if not ax.get_visible() else {}
        # Tick labels beyond the limits exist, but are not drawn.
        drawn |= {t: inside(t.get_position()[0], ax.get_xlim()) for t in ax.get_xticklabels()}
        drawn |= {t: inside(t.get_position()[1], ax.get_ylim()) for t in ax.get_yticklabels()}
    boxes = [(t, t.get_window_extent()) for t, shown in drawn.items() if shown and t.get_visible()]
    boxes = [(text.get_text(), box, text.get_rotation()) for text, box in boxes if box.width > 0]
    assert len(boxes) > 10
    for text, box, _ in boxes:
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, text
        assert box.y0 >= -1 and box.y1 <= figure.bbox.y1 + 1, text
    # The box of a slanted label is larger than its text.
    straight = [entry for entry in boxes if entry[2] in (0, 90)]
    for i, (text, box, _) in enumerate(straight):
        for other, its, _ in straight[i + 1 :]:
            assert box.x1 <= its.x0 or its.x1 <= box.x0 or box.y1 <= its.y0 or its.y1 <= box.y0, (text, other)


def inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def test_a_draft_keeps_its_colour_whatever_else_is_shown() -> None:
    content = profile({"a": workload(drafts=DRAFTS[1:]), "b": workload()})
    assert looks(content)[DRAFTS[1]].colour == COLOURS[1]


def test_a_draft_that_never_proposed_and_a_longest_k_of_one() -> None:
    row = workload(1.2, drafts=("prompt-lookup",), longest=1)
    row["acceptance"]["prompt-lookup"] = {"by_position": [], "interval_90": [], "steps": 0}
    content = profile({"w": row}, ("prompt-lookup",))
    texts = [text.get_text() for text in acceptance_figure(content).axes[0].texts]
    assert "no draft proposed anything" in texts
    assert best_ratio(*step_costs(typed(row), "prompt-lookup")) == (0, 1.0)
    assert "no K pays" in " ".join(t.get_text() for t in cost_figure(content).axes[0].texts)
    assert "nothing proposed" in report_page(content)


def test_acceptance_without_intervals_is_drawn() -> None:
    row = workload()
    row["acceptance"][DRAFTS[0]]["interval_90"] = []
    content = profile({"served": row})
    acceptance_figure(content).draw_without_rendering()
    assert "70% (70% to 70%)" in report_page(content)


# Page


# Two profiles


def test_comparison_judges_by_intervals() -> None:
    first = profile(
        {
            "alike": workload(1.5),
            "better": workload(2.0),
            "worse": workload(1.2),
            "lost": workload(0.8),
            "both-plain": workload(0.8),
            "new": workload(),
            "unmeasured": unmeasured(),
        }
    )
    second = profile(
        {
            "alike": workload(1.6),
            "better": workload(1.5),
            "worse": workload(1.9),
            "lost": workload(1.5),
            "both-plain": workload(0.9),
            "gone": workload(),
            "unmeasured": workload(),
        }
    )
    second.created, second.machine.load_average = "2026-02-02T00:00:00+00:00", 7.0
    second.machine.torch, second.target.fingerprint = "2.14.0", "0000"
    del second.drafts[DRAFTS[2]]
    found = compare_profiles(first, second)
    assert {name: pair["difference"] for name, pair in found["workloads"].items()} == {
        "alike": "noise",
        "better": "first-gains-more",
        "worse": "second-gains-more",
        "lost": "second-gains-more",
        "both-plain": "both-plain",
        "new": "only-first",
        "gone": "only-second",
        "unmeasured": "unmeasured",
    }
    assert found["changed"] == [
        {"field": "target.fingerprint", "first": "0123456789abcdef", "second": "0000"},
        {"field": f"drafts.{DRAFTS[2]}.name", "first": DRAFTS[2], "second": None},
        {"field": "machine.torch", "first": "2.13.0", "second": "2.14.0"},
    ]
    assert found["workloads"]["alike"]["first"]["verify_cost"] == pytest.approx(1.06)
    json.dumps(found)
    against_figure(found, ("a", "b")).draw_without_rendering()


def test_comparison_tells_where_acceptance_differs() -> None:
    first, second = (profile({"w": workload(share=share)}) for share in (0.7, 0.5))
    assert compare_profiles(first, first)["workloads"]["w"]["acceptance_differs"] == {}
    # Half-widths of 0.05: 0.7 - 0.5, 0.49 - 0.25, 0.343 - 0.125, 0.24 - 0.0625, 0.168 - 0.031, 0.118 - 0.016, ...
    assert compare_profiles(first, second)["workloads"]["w"]["acceptance_differs"] == dict.fromkeys(
        DRAFTS, [1, 2, 3, 4, 5, 6]
    )


# The command
