"""The page of a report, and the tables beside it: complete, self-contained, with names of any kind."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridspec.tuning.configuration import Configuration
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.reporting.page import report_page
from hybridspec.tuning.reporting.terminal import concurrency_tables, profile_table
from hybridspec.tuning.reporting.words import prompts_behind, short_names, shorten
from hybridspec.tuning.reporting.write import write_report
from tests.profiles import DRAFTS, at_once, profile, trial, unmeasured, workload
from tests.report_runs import printed, run, saved, typed


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
    assert status == 0 and json.loads(out) == Profile.load(folder).to_dict()
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
