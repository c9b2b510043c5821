"""Speculative decoding for hybrid language models, with exact state rollback.

The names below load on first use, so that ``import hybridspec`` stays quick.
"""

from importlib import import_module
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# Python that runs in the root of a checkout finds this folder before an installed package, and there drafts/ and
# tuning/ lie beside it.
if not (_FOLDER / "drafts").is_dir():
    __path__.append(str(_FOLDER.parent))
_WHERE = {
    "TargetRunner": "hybridspec.runtime.runner",
    "LoadOptions": "hybridspec.runtime.options",
    "Session": "hybridspec.runtime.session",
    "Sampling": "hybridspec.decoding.sampling",
    "Statistics": "hybridspec.decoding.step",
    "decode": "hybridspec.decoding.loop",
    "check": "hybridspec.checker.check",
    "Report": "hybridspec.checkpoints.findings",
    "Finding": "hybridspec.checkpoints.findings",
    "SameArchitectureDraft": "hybridspec.drafts.same_architecture",
    "enable_assisted_generation": "hybridspec.decoding.assisted_generation",
    "disable_assisted_generation": "hybridspec.decoding.assisted_generation",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hybridspec' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
