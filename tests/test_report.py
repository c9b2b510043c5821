"""Reports: what plots, page, tables and the command show, and that they show what the profile holds."""

import base64
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from hybridspec.cli import app as cli
from hybridspec.tuning.configuration import Configuration
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_file import read_profile
from hybridspec.tuning.profile_records import WorkloadProfile
from hybridspec.tuning.reporting.acceptance import acceptance_figure
from hybridspec.tuning.reporting.against import compare_profiles
from hybridspec.tuning.reporting.against_plot import against_figure
from hybridspec.tuning.reporting.costs import best_ratio, cost_figure, shown_draft, step_costs
from hybridspec.tuning.reporting.figures import COLOURS, looks
from hybridspec.tuning.reporting.page import report_page
from hybridspec.tuning.reporting.speedup import rule_labels, speedup_figure
from hybridspec.tuning.reporting.terminal import concurrency_tables, profile_table
from hybridspec.tuning.reporting.words import prompts_behind, short_names, shorten
from hybridspec.tuning.reporting.write import write_report
from tests.profiles import DRAFTS, at_once, profile, trial, unmeasured, workload

FIGURES = (acceptance_figure, speedup_figure, cost_figure)
EIGHT = {f"workload-{i}": workload(1.1 + 0.1 * i) for i in range(5)} | {
    "plain": workload(0.8),
    "unmeasured": unmeasured(),
    "surveyed": workload(None),
}


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hybridspec", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def typed(row: dict) -> WorkloadProfile:
    return WorkloadProfile.model_validate(row)


def saved(folder: Path, content: Profile) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "profile.json"
    path.write_text(json.dumps(content.to_dict()))
    return path


def printed(table: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


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


class Page(HTMLParser):
    """Tags, links and text of a page; fails on a tag that is not closed."""

    VOID = ("meta", "img", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone_and_tells_everything() -> None:
    odd = "<script>alert(1)</script> & co"
    content = profile(
        {odd: workload(), "plain": unmeasured() | {"chosen": workload(0.8)["chosen"], "reason": "it loses"}}
    )
    content.drafts[DRAFTS[0]].fingerprint = "fedcba9876543210"
    page = Page(report_page(content))
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in page.links)
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for expected in (odd, "0123456789abcdef", "fedcba9876543210", "2.13.0", "it loses", "plain decoding"):
        assert expected in text
    for row in content["workloads"].values():
        assert not row["reason"] or row["reason"] in text
        for entry in row["trials"]:
            assert entry["pruned"] or f"{entry['speedup']:.2f} ({entry['interval'][0]:.2f}" in text
    pictures = [link for link in page.links if link.startswith("data:")]
    # Speed-up and acceptance of both workloads, costs of the one that has them.
    assert len(pictures) == 5
    assert all(b"<svg" in base64.b64decode(link.partition(",")[2]) for link in pictures)


def test_the_same_profile_gives_the_same_files(tmp_path: Path) -> None:
    content = profile({"nothing": unmeasured()})
    for folder in ("a", "b"):
        paths = write_report(content, tmp_path / folder)
        assert [path.name for path in paths] == ["acceptance.png", "speedup.png", "costs.png", "report.html"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_a_profile_without_workloads_has_a_page_and_no_plots(tmp_path: Path) -> None:
    (page,) = write_report(profile({}), tmp_path)
    assert "no workload" in page.read_text()


def test_concurrency_is_shown_where_there_is_any() -> None:
    row = workload() | {"by_concurrency": {"16": at_once(k=1, speedup=1.05), "2": at_once(k=4)}}
    content = profile({"served": row, "unknown": unmeasured()})
    (table,) = concurrency_tables(content)
    assert re.search(r"2\s*│ 4\s*│ -.*16\s*│ 1\s*│ 1\.05", printed(table), re.S)
    assert report_page(content).count("requests at once") == 1


def test_the_answer_says_how_many_prompts_it_rests_on() -> None:
    """Those of the configuration that was chosen, further ones included; for plain decoding, of the best rival."""
    best, other = Configuration(DRAFTS[0], "2"), Configuration(DRAFTS[0], "svip")
    won = workload(1.5) | {"trials": [trial(other, 1.6, prompts=4), trial(best, 1.5, prompts=12)]}
    lost = workload(0.9) | {"trials": [trial(other, 0.8, prompts=4), trial(best, 0.9, prompts=7)]}
    cells = [re.split(r"\s*│\s*", line) for line in printed(profile_table(profile({"a": won, "b": lost}))).splitlines()]
    assert {row[1]: row[7] for row in cells if len(row) > 7} == {"a": "12", "b": "7"}
    assert "on 12 prompts: 1.50" in report_page(profile({"a": won}))
    assert prompts_behind(typed(workload(None))) is None


def test_names_are_not_read_as_markup() -> None:
    table = printed(profile_table(profile({"[red]x[/red]": workload(drafts=("[b]d",))}, ("[b]d",))))
    assert "[red]x[/red]" in table and "[b]d" in table


def test_short_names_stay_apart() -> None:
    names = short_names(
        ["same-architecture:draft-2-layers", "/a/Qwen", "/b/Qwen", "mtp", "same-architecture:path=/c/d"]
    )
    assert list(names.values()) == ["draft-2-layers", "/a/Qwen", "/b/Qwen", "mtp", "d"]
    assert shorten("a" * 10 + "z" * 10, 9) == "aaaa…zzzz"


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


def test_report_writes_beside_the_profile(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = saved(tmp_path / "tuned", profile({"json": workload()}))
    status, out, _ = run(capsys, "report", str(path))
    assert status == 0
    assert "json" in out and "1.50 (1.40 to 1.60)" in out and "the fastest of those measured" in out
    names = {p.name for p in path.parent.iterdir()}
    assert names == {"profile.json", "acceptance.png", "speedup.png", "costs.png", "report.html"}


def test_report_json_and_html_alone(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folder = saved(tmp_path / "tuned", profile({"json": workload()})).parent
    status, out, _ = run(capsys, "report", str(folder), "--json")
    assert status == 0 and json.loads(out) == read_profile(folder).to_dict()
    status, _, _ = run(capsys, "report", str(folder), "--html", str(tmp_path / "pages" / "x.html"))
    assert status == 0 and [p.name for p in (tmp_path / "pages").iterdir()] == ["x.html"]
    assert [p.name for p in folder.iterdir()] == ["profile.json"]
    status, _, err = run(capsys, "report", str(folder), "--html", str(tmp_path / "pages"))
    assert status == 2 and "cannot be written" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pages", "tuned"]


def test_report_against(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    row = workload(1.5) | {"trials": [trial(Configuration("new", "1"), 1.2)]}
    one = saved(tmp_path / "now", profile({"json": workload(1.5), "both": row}))
    other = saved(tmp_path / "before", profile({"json": workload(1.9), "both": row}, hybridspec="0.0.9"))
    out_folder = tmp_path / "out"
    status, out, _ = run(capsys, "report", str(one), "--against", str(other.parent), "--out", str(out_folder))
    assert status == 0
    assert "before gains more" in out and "inside the noise" in out and "hybridspec: 0.0.9 -> 0.1.0" in out
    assert {p.name for p in out_folder.iterdir()} == {"against.png", "against.html"}
    page = Page((out_folder / "against.html").read_text())
    assert "before gains more" in " ".join(page.text) and "script" not in page.tags
    status, out, _ = run(capsys, "report", str(one), "--against", str(other), "--json")
    assert status == 0 and json.loads(out)["workloads"]["json"]["difference"] == "second-gains-more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"schema": 1}', "field schema is 1"),
        (json.dumps(profile({"w": workload()}).to_dict()).replace('"best_k": 2', '"best_k": -1'), "workloads.w.best_k"),
    ],
)
def test_a_profile_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture, tmp_path: Path, text: str | None, expected: str
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    good = saved(tmp_path / "good", profile({}))
    for arguments in ((str(path),), (str(good), "--against", str(path))):
        status, out, err = run(capsys, "report", *arguments)
        assert status == 2 and not out
        assert str(path) in err and expected in err and "Traceback" not in err


def test_a_place_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = saved(tmp_path / "tuned", profile({}))
    blocked = tmp_path / "file"
    blocked.write_text("")
    status, _, err = run(capsys, "report", str(path), "--out", str(blocked))
    assert status == 2 and f"{blocked}" in err and "cannot be written" in err
