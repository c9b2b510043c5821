"""Compiling before anything is measured."""

from collections.abc import Callable, Iterable
from typing import Any

from hybridspec.runtime.runner import TargetRunner


def compile_ahead(
    target: TargetRunner, drafts: Iterable[Any], longest: int, tell: Callable[[str], object] = lambda text: None
) -> None:
    """Prepares the compiled passes of a target that verifies up to ``longest`` drafted tokens, and those of the drafts
    that have a compiled model of their own; does nothing where ``target`` was not asked to be compiled.

    Raises:
        UnsupportedLayerError: see :meth:`hybridspec.runtime.compiled.CompiledPasses.prepare`.
    """
    if target.compiled is None:
        return
    target.compiled.prepare(longest + 1, tell)
    for draft in drafts:
        passes = getattr(getattr(draft, "runner", None), "compiled", None)
        if passes is not None and passes is not target.compiled:
            # Two tokens after a block that was accepted as a whole.
            passes.prepare(2, tell)
