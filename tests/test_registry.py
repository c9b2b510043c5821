"""Strategies and rules by name: ours, those of other packages, and what a typing mistake is answered with."""

import sys
from pathlib import Path

import pytest

from hybridspec.decoding.draft_length import FixedLength
from hybridspec.decoding.loop import decode
from hybridspec.drafts.prompt_lookup import PromptLookupDraft
from hybridspec.drafts.registry import make_draft, make_length
from hybridspec.errors import InputError
from hybridspec.specs import LENGTHS, STRATEGIES

PACKAGE = """
from hybridspec.decoding.draft import Draft, Drafting
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.draft_length import DraftLength


class Parrot(Draft, Drafting):
    \"\"\"Always proposes one token, and needs no state.\"\"\"

    def __init__(self, token: int = 1) -> None:
        self.name, self.token = "parrot", token

    @classmethod
    def create(cls, target, token: int = 1):
        return cls(token)

    def start(self, prompt, sampling, generator=None, target=None):
        return self

    def propose(self, k, proceed=None):
        return Proposal([self.token] * k)

    def accept(self, accepted, token): ...
    def snapshot(self): ...
    def restore(self, mark): ...
    def close(self): ...


class Odd(DraftLength):
    name, longest = "odd", 3

    def limit(self):
        return 3


NOT_A_DRAFT = 3
"""
ENTRIES = """
[hybridspec.drafts]
parrot = third_party:Parrot
absent = third_party:Absent
number = third_party:NOT_A_DRAFT

[hybridspec.lengths]
odd = third_party:Odd
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package of somebody else's."""
    (tmp_path / "third_party.py").write_text(PACKAGE)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "third_party", raising=False)


@pytest.mark.usefixtures("third_party")
def test_another_packages_strategy_and_rule_run(make_runner) -> None:
    target = make_runner("plain")
    assert "parrot" in STRATEGIES.names()
    draft, length = make_draft("parrot:token=5", target), make_length("odd")
    assert draft.token == 5
    options = {"max_new_tokens": 12, "stop_tokens": frozenset()}
    plain = [t.id for t in decode(target, [3, 4, 5], **options)]
    assert [t.id for t in decode(target, [3, 4, 5], draft=draft, k=length, **options)] == plain


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(("spec", "message"), [("absent", "cannot be loaded"), ("number", "is not a Draft")])
def test_a_broken_entry_point_is_named(make_runner, spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_draft(spec, make_runner("plain"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prompt-lokup", "Did you mean 'prompt-lookup'"),
        ("telepathy", "Choose one of same-architecture"),
        ("prompt-lookup:size=3", "'size=3' is no option. It takes longest, shortest, window"),
        ("prompt-lookup:longest=", "no option"),
        ("same-architecture", "needs path: write same-architecture:PATH"),
        ("prompt-lookup:longest=abc", "longest must be a whole number, not 'abc'"),
        ("prompt-lookup:window=1.5", "window must be a whole number"),
        ("same-architecture:no/such/folder", "no such folder"),
    ],
)
def test_a_wrong_strategy_is_answered_with_the_right_ones(make_runner, spec: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        make_draft(spec, make_runner("plain"))


def test_options_are_read() -> None:
    assert STRATEGIES.options("x", "4,window=7,shortest=2", PromptLookupDraft) == {
        "longest": 4,
        "window": 7,
        "shortest": 2,
    }


def test_a_number_is_a_fixed_length() -> None:
    assert isinstance(make_length("3"), FixedLength)
    assert make_length(3).longest == make_length("fixed:3").longest == make_length("fixed:k=3").limit() == 3
    for wrong in ("fixed:-1", -1):
        with pytest.raises(InputError, match="-1"):
            make_length(wrong)
    with pytest.raises(InputError, match="Did you mean 'fixed'"):
        make_length("fixd")
    with pytest.raises(InputError, match="whole number, not 2.5"):
        make_length("2.5")


@pytest.mark.parametrize("registry", [STRATEGIES, LENGTHS], ids=lambda registry: registry.kind)
def test_every_known_name_has_its_class(registry) -> None:
    for name in registry.known:
        assert issubclass(registry.find(name), registry.base)


def test_the_package_names_what_it_offers() -> None:
    from hybridspec import drafts

    assert all(getattr(drafts, name).__name__ == name for name in drafts.__all__)
    known = {place.partition(":")[2] for registry in (STRATEGIES, LENGTHS) for place in registry.known.values()}
    assert known <= set(drafts.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Guess'"):
        _ = drafts.Guess
