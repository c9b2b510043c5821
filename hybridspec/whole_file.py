"""Files that are written in one piece."""

from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Replaces the file in one move, text as UTF-8: an interrupt leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
