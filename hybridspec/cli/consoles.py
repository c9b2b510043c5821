"""What commands show on a terminal, or in its place: consoles for tables, and the progress of long work."""

import os

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """One line for each task, with time gone by and what is running."""
    return Progress(
        TextColumn("{task.description:14}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )


def table_console(width: int) -> Console:
    """Standard output; ``width`` columns where it is no terminal and the environment does not say how wide it is."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console
