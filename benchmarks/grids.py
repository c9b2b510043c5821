"""A table that is printed on a terminal and written as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table


@dataclass
class Grid:
    """``rows`` of text under ``headings``; the first column is to the left. ``notes`` are sentences below it."""

    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rich(self) -> Table:
        table = Table(title=escape(self.title), title_justify="left", caption_justify="left")
        table.caption = escape("\n".join(self.notes)) or None
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        lines = [[*self.headings], ["---:" if i else "---" for i in range(len(self.headings))], *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
        return "\n\n".join(part for part in (f"**{self.title}**", table, " ".join(self.notes)) if part)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def spread(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    """A value with its interval behind it."""
    if value is None or not interval:
        return number(value, digits)
    low, high = interval
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def size(count: float) -> str:
    """Bytes, as a reader wants them."""
    for unit in ("B", "KiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} MiB" if count < 1024 else f"{count / 1024:.2f} GiB"
