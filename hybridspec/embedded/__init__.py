"""The trained pair and the workloads that ship with the package."""

from pathlib import Path

HERE = Path(__file__).resolve().parent

TARGET = HERE / "target"
#: Drafts of the embedded target, smallest first.
DRAFTS = {"draft-2-layers": HERE / "draft-2-layers", "draft-4-layers": HERE / "draft-4-layers"}
DEFAULT_DRAFT = "draft-2-layers"
#: What stands in for the recurrent layers when the target drafts with its full-attention layers alone.
BRIDGES = HERE / "bridges"
WORKLOADS = HERE / "workloads"


def workload_files() -> dict[str, Path]:
    """Name to JSONL file, in alphabetical order."""
    return {path.stem: path for path in sorted(WORKLOADS.glob("*.jsonl"))}
