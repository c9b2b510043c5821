"""Makes draft strategies and draft-length rules from what users write: see :mod:`hybridspec.specs` for their names."""

import inspect
import re
from typing import TYPE_CHECKING

from hybridspec.decoding.draft import Draft
from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.errors import InputError
from hybridspec.specs import LENGTHS, STRATEGIES, draft_spec

if TYPE_CHECKING:
    from hybridspec.runtime.runner import TargetRunner


def make_draft(spec: str, target: "TargetRunner") -> Draft:
    """The strategy that ``spec`` names, for ``target``: ``NAME`` or ``NAME:option=value,...``, for example
    ``same-architecture:path/to/draft`` or ``prompt-lookup:longest=3``; a folder alone is a same-architecture draft.

    Raises:
        InputError: unknown name or option; says which exist.
    """
    name, _, text = draft_spec(spec).partition(":")
    strategy = STRATEGIES.find(name)
    draft = strategy.create(target, **STRATEGIES.options(name, text, strategy.create))
    draft.check_pair(target)
    return draft


def make_length(spec: str | int) -> DraftLength:
    """The rule that ``spec`` names: a number (fixed K), ``NAME`` or ``NAME:option=value,...``.

    Raises:
        InputError: unknown name or option; says which exist.
    """
    if isinstance(spec, int) or re.fullmatch(r"\s*-?\d+\s*", spec):
        return FixedLength(int(spec))
    if re.fullmatch(r"\s*-?[\d.]+\s*", spec):
        raise InputError(f"the draft length K must be a whole number, not {spec}")
    name, _, text = spec.partition(":")
    rule = LENGTHS.find(name)
    return rule(**LENGTHS.options(name, text, rule))


def with_longest(spec: str, longest: int) -> str:
    """``spec`` of a rule with ``longest`` as its cap, if it takes one and does not name it."""
    name, _, text = spec.partition(":")
    if spec.isdecimal() or "longest" not in inspect.signature(LENGTHS.find(name)).parameters or "longest=" in text:
        return spec
    return f"{name}:{text},longest={longest}" if text else f"{name}:longest={longest}"
