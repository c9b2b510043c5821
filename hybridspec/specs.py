"""Names of draft strategies and draft-length rules, and the options behind them, as users write them: ``NAME`` or
``NAME:option=value,...``. Nothing is imported before it is asked for.

Another package adds a strategy by an entry point: ``[project.entry-points."hybridspec.drafts"]`` with a line
``my-draft = "my_package.drafting:MyDraft"`` (a :class:`~hybridspec.decoding.draft.Draft`), or a rule in the group
``hybridspec.lengths`` (a :class:`~hybridspec.decoding.draft_length.DraftLength`).
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from hybridspec import embedded
from hybridspec.errors import InputError


class Registry:
    """Names and where their classes are.

    Args:
        kind: what the names are, for messages.
        group: entry-point group of other packages.
        known: name -> ``module:class``.
        base: what they all are, ``module:class``.
    """

    def __init__(self, kind: str, group: str, known: Mapping[str, str], base: str) -> None:
        self.kind, self.group, self.known, self._base = kind, group, known, base

    @property
    def base(self) -> type:
        """The class that all of them are."""
        return _imported(self._base)

    def names(self) -> list[str]:
        return [*self.known, *sorted(e.name for e in entry_points(group=self.group) if e.name not in self.known)]

    def find(self, name: str) -> type:
        """The class called ``name``.

        Raises:
            InputError: there is none, with the nearest name; or another package's entry point cannot be loaded.
        """
        if name in self.known:
            return _imported(self.known[name])
        entry = next(iter(entry_points(group=self.group, name=name)), None)
        if entry is None:
            raise self.unknown(name)
        try:
            found = entry.load()
        except Exception as error:
            raise InputError(f"{self.kind} {name!r} ({entry.value}) cannot be loaded: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self.base)):
            raise InputError(f"{self.kind} {name!r} ({entry.value}) is not a {self.base.__name__}")
        return found

    def unknown(self, name: str) -> InputError:
        """Says that there is no ``name``, with the nearest one or all of them."""
        names = self.names()
        near = difflib.get_close_matches(name, names, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(names)}."
        return InputError(f"unknown {self.kind} {name!r}. {hint}")

    def options(self, name: str, text: str, factory: Callable) -> dict[str, object]:
        """Options from ``key=value,key=value``; a first value without a key is the factory's first parameter.

        Raises:
            InputError: an unknown or malformed option; names those that exist.
        """
        parameters = [
            p
            for p in inspect.signature(factory).parameters.values()
            if p.name not in ("self", "target") and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        known = {p.name: p for p in parameters}
        options: dict[str, object] = {}
        for i, (part, key, value) in enumerate(split_options(text)):
            if key is None and i == 0 and parameters:
                key = parameters[0].name
            if key not in known or not value:
                raise InputError(f"{self.kind} {name!r}: {part!r} is no option. It takes {', '.join(known) or 'none'}.")
            options[key] = self._typed(name, known[key], value)
        missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
        if missing:
            short = missing[0].upper() if missing[0] == parameters[0].name else f"{missing[0]}=..."
            raise InputError(f"{self.kind} {name!r} needs {missing[0]}: write {name}:{short}")
        return options

    def _typed(self, name: str, parameter: inspect.Parameter, text: str) -> object:
        """The value of an option, of the type that its parameter is annotated with."""
        if parameter.annotation is str:
            return text
        value = _value(text)
        wanted = {int: int, float: (int, float)}.get(parameter.annotation)
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            kind = "a whole number" if parameter.annotation is int else "a number"
            raise InputError(f"{self.kind} {name!r}: {parameter.name} must be {kind}, not {text!r}")
        return value


def split_options(text: str) -> Iterator[tuple[str, str | None, str]]:
    """``(part, key, value)`` of every part of ``key=value,key=value``. Keys come with underscores for hyphens; a part
    without ``=`` has no key and is all value.
    """
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        yield (part, key.strip().replace("-", "_"), value.strip()) if equals else (part, None, part.strip())


def _value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _imported(place: str) -> type:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


STRATEGIES = Registry(
    "draft strategy",
    "hybridspec.drafts",
    {
        "same-architecture": "hybridspec.drafts.same_architecture:SameArchitectureDraft",
        "full-attention": "hybridspec.drafts.full_attention.strategy:FullAttentionDraft",
        "prompt-lookup": "hybridspec.drafts.prompt_lookup:PromptLookupDraft",
        "mtp": "hybridspec.drafts.mtp.strategy:MultiTokenPredictionDraft",
    },
    "hybridspec.decoding.draft:Draft",
)
LENGTHS = Registry(
    "draft-length rule",
    "hybridspec.lengths",
    {
        "fixed": "hybridspec.decoding.draft_length:FixedLength",
        "svip": "hybridspec.drafts.length.entropy:SVIP",
        "adaedl": "hybridspec.drafts.length.entropy:AdaEDL",
        "expected-gain": "hybridspec.drafts.length.expected_gain:ExpectedGain",
        "bandit": "hybridspec.drafts.length.bandit:Bandit",
    },
    "hybridspec.decoding.draft_length:DraftLength",
)


def draft_spec(spec: str) -> str:
    """``spec``, with a folder, or the name of an embedded draft, written out as the same-architecture draft that it
    stands for.
    """
    is_name = spec.partition(":")[0] in STRATEGIES.names()
    if spec in embedded.DRAFTS:
        return f"same-architecture:{spec}"
    return spec if is_name or not ("/" in spec or Path(spec).exists()) else f"same-architecture:{spec}"
