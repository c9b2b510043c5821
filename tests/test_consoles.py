"""What goes into a pipe is whole: no heading, name or number is cut."""

import pytest
from rich.table import Table

from hybridspec.cli import probe
from hybridspec.cli.consoles import table_console
from hybridspec.drafts.full_attention.viability import Viability

NAMES = [f"/checkpoints/{'long-' * 8}{i}" for i in range(3)]


def table() -> Table:
    table = Table(title="pairs")
    table.add_column("target", overflow="fold")
    table.add_column("draft")
    table.add_column("verdict in full", no_wrap=True)
    table.add_row(NAMES[0], NAMES[1], "can pay")
    table.add_row("prose: " + "words " * 60, NAMES[2], "cannot pay")
    return table


def test_a_piped_table_cuts_nothing(capsys: pytest.CaptureFixture) -> None:
    console = table_console(60)
    console.print(table())
    out = capsys.readouterr().out
    assert all(name in out for name in (*NAMES, "verdict in full", "cannot pay"))
    assert "…" not in out
    # Prose wraps as before, and so does text after the table.
    assert max(map(len, out.splitlines())) < 200
    console.print("words " * 30)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_a_narrow_table_stays_narrow(capsys: pytest.CaptureFixture) -> None:
    narrow = Table("a", "b")
    narrow.add_row("1", "2")
    table_console(60).print(narrow)
    assert max(map(len, capsys.readouterr().out.splitlines())) < 12


def test_the_environment_says_how_wide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    table_console(120).print(table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 50


def test_probe_shows_whole_headings_and_file_names(capsys: pytest.CaptureFixture) -> None:
    row = Viability(
        tokens=1000, perplexity=10.0, reduced_perplexity=20.0, alone_perplexity=30.0, agreement=0.5, acceptance=0.6
    )
    name = "chapter-" * 9 + "1.txt"
    probe.show({name: row, "all": row}, "target", "full-attention")
    out = capsys.readouterr().out
    assert name in out and "ratio alone" in out and "perplexity" in out and "…" not in out
