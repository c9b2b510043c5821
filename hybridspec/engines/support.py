"""The support matrix: what engines do with a pair, by draft method, each entry with the version it was read from.

The matrix is data, in ``support.toml``. An entry holds where one of its conditions does, and a condition where all of
its parts do; see :class:`SupportEntry` for these. Of an engine's entries for one method, the first that holds counts.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hybridspec.checkpoints.findings import Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Verdict = Literal["works", "refused", "wrong", "not as asked", "slow"]


@dataclass(frozen=True)
class PairFacts:
    """What conditions look at.

    Attributes:
        hybrid, draft_hybrid: some layer keeps a state or a window.
        mixers, draft_mixers: recurrences and convolutions, by tensors.
        head: the target announces a prediction head and has its tensors.
        vocabularies: vocab_size of both.
        tokens_agree: the tokenizers are the same; None if unknown.
    """

    model_type: str
    hybrid: bool
    mixers: frozenset[str]
    head: bool = False
    draft_type: str | None = None
    draft_hybrid: bool = False
    draft_mixers: frozenset[str] = frozenset()
    draft_head: bool = False
    vocabularies: tuple[int | None, int | None] = (None, None)
    tokens_agree: bool | None = None

    @property
    def sizes_differ(self) -> bool:
        a, b = self.vocabularies
        return a is not None and b is not None and a != b


@dataclass(frozen=True)
class SupportEntry:
    """One entry of the matrix.

    Attributes:
        needs_draft: it is about a draft model.
        when: conditions, each a table of parts. ``hybrid``, ``draft_hybrid``, ``head``, ``draft_head``,
            ``sizes_differ`` and ``tokens_agree`` are compared with the fact of that name; ``mixers`` lists those of
            which the target has one; ``model_type`` and ``draft_type`` list whole names, ``family`` and
            ``draft_family`` beginnings of the two; with ``_not`` behind, what none of them may be. None: it always
            holds.
    """

    engine: str
    version: str
    method: str
    verdict: Verdict
    text: str
    instead: str = ""
    needs_draft: bool = True
    when: tuple[Mapping[str, Any], ...] = ({},)

    def holds(self, facts: PairFacts) -> bool:
        return any(all(_holds(part, value, facts) for part, value in condition.items()) for condition in self.when)


def _holds(part: str, value: Any, facts: PairFacts) -> bool:
    name = part.removesuffix("_not")
    if name != part:
        return not _holds(name, value, facts)
    if name in ("family", "draft_family"):
        of = facts.model_type if name == "family" else facts.draft_type
        return bool(of) and of.startswith(tuple(value))
    fact = getattr(facts, name)
    if name == "mixers":
        return bool(fact & set(value))
    return fact in value if isinstance(value, list) else fact is value


@dataclass(frozen=True)
class Support:
    """What an engine does with a pair by one method."""

    engine: str
    version: str
    method: str
    verdict: Verdict
    text: str
    instead: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).with_name("support.toml")).read_text(encoding="utf-8"))


def listed(name: str) -> tuple[str, ...]:
    """One of the matrix's lists of model types, mixers or methods."""
    return tuple(_table()["lists"][name])


@cache
def matrix() -> tuple[SupportEntry, ...]:
    """Every entry, in order."""
    table = _table()

    def filled(value: Any) -> Any:
        return list(listed(value[1:])) if isinstance(value, str) and value.startswith("@") else value

    entries = []
    for entry in table["entry"]:
        instead = entry.get("instead", "")
        own = {
            "version": table["versions"][entry["engine"]],
            "instead": table["instead"][instead[1:]] if instead.startswith("@") else instead,
            "when": tuple({key: filled(v) for key, v in part.items()} for part in entry.get("when", [{}])),
        }
        entries.append(SupportEntry(**entry | own))
    return tuple(entries)


#: Verdict -> code of a finding.
CODES = {"refused": "HS601", "wrong": "HS602", "not as asked": "HS603"}


def engines() -> tuple[str, ...]:
    """Names of the engines, in order."""
    return tuple(_table()["versions"])


def support(facts: PairFacts) -> list[Support]:
    """What each engine does with the pair, or with the target alone if there is no draft."""
    found: dict[tuple[str, str], Support] = {}
    for entry in matrix():
        key = entry.engine, entry.method
        if key in found or (entry.needs_draft and facts.draft_type is None) or not entry.holds(facts):
            continue
        found[key] = Support(entry.engine, entry.version, entry.method, entry.verdict, entry.text, entry.instead)
    return list(found.values())


def engine_findings(rows: list[Support], asked: str | None, paired: bool) -> list[Finding]:
    """One finding per engine that fails with a draft model; an error or warning for the engine that was asked for."""
    found = []
    for row in rows:
        code = CODES.get(row.verdict)
        # Without a draft, methods that need none say what speculation the target allows.
        about_pair = row.method in {"draft_model", "assistant_model", "STANDALONE", "draft model"}
        if code is None or (paired and not about_pair):
            continue
        severity = "note" if row.engine != asked else "warning" if row.verdict == "not as asked" else "error"
        seen = f"{row.version}, {row.method}: {row.text}"
        action = f"What works instead: {row.instead}." if row.instead else ""
        found.append(Finding(code, "pair" if paired else "target", seen, severity=severity, action=action))
    return found
