"""What commands show on a terminal, or in its place: consoles for tables, and the progress of long work."""

import os
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Wide enough to measure anything.
WIDEST = 10_000


def progress_bar(console: Console, description: int = 14, bar: int = 24) -> Progress:
    """One line for each task, with time gone by and what is running; columns of its description and its bar."""
    return Progress(
        TextColumn(f"{{task.description:{description}}}"),
        BarColumn(bar),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )


def table_console(width: int) -> Console:
    """Standard output. Where it is no terminal, and the environment does not say how wide it is, text is wrapped at
    ``width`` columns, and a table that would cut a heading or a word there is as wide as it must be.
    """
    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return WholeTables(highlight=False, width=width)


class WholeTables(Console):
    """A console that grows for a table."""

    def print(self, *objects: Any, **options: Any) -> None:
        width = self.width
        self.width = max([width, *(self._least(table) for table in objects if isinstance(table, Table))])
        try:
            super().print(*objects, **options)
        finally:
            self.width = width

    def _least(self, table: Table) -> int:
        """The width at which every column holds its longest word, which it is made to keep."""
        options = self.options.update(width=WIDEST)
        for column in table.columns:
            sizes = [Measurement.get(self, options, part) for part in (column.header, *column.cells)]
            column.min_width = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        return Measurement.get(self, options, table).minimum
