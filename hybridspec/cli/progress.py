"""The progress display of commands that take long."""

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
