"""Fills dataclasses from what users wrote, in files and on command lines: names and types are checked, with hints."""

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hybridspec.errors import InputError

T = TypeVar("T")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


def fill(
    kind: type[T], values: Mapping[str, object], where: str, text: bool = False, special: Mapping[type, Callable] = {}
) -> T:
    """An instance of the dataclass ``kind``.

    Args:
        where: file or option that the values come from; begins every message.
        text: the values are text of a command line, to be read as what the fields are.
        special: readers ``(value, where) -> object`` for types that may be written in several ways.

    Raises:
        InputError: an unknown key (with the nearest known one), a missing one, or a value of another type.
    """
    hints = get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind) if f.init}
    filled = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(known)}."
            raise InputError(f"{where}: unknown key {key!r}. {hint}")
        place = f"{where}: {key}"
        read = from_text(value, hints[name], place) if text else value
        filled[name] = convert(read, hints[name], place, special)
    required = (dataclasses.MISSING, dataclasses.MISSING)
    for name, field in known.items():
        if name not in filled and (field.default, field.default_factory) == required:
            raise InputError(f"{where}: {name} is missing")
    try:
        return kind(**filled)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def convert(value: object, hint: Any, where: str, special: Mapping[type, Callable] = {}) -> Any:
    """``value`` as the type ``hint``; a whole number serves as a number, nothing else is bent."""
    if hint in special:
        return special[hint](value, where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return convert(value, next(a for a in arguments if a is not type(None)), where, special)
    if origin is Literal:
        if value not in arguments:
            near = difflib.get_close_matches(str(value), arguments, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(map(str, arguments))}"
            raise InputError(f"{where} is {value!r}: {hint}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where} must be a list, not {shown(value)}")
        return tuple(convert(v, arguments[0], f"{where}[{i}]", special) for i, v in enumerate(value))
    if origin is Mapping or hint in (dict, Mapping) or origin is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} must be a table, not {shown(value)}")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} must be a table, not {shown(value)}")
        return fill(hint, value, where, special=special)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint in (str, Path) and isinstance(value, str):
        if not value.strip():
            raise InputError(f"{where} is empty")
        value = hint(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{where} must be {KINDS[hint]}, not {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} must be a finite number, not {value}")
    return value


def from_text(value: object, hint: Any, where: str) -> object:
    """What stands for a ``bool``, ``int`` or ``float`` on a command line; other text stays as it is."""
    kind = next(a for a in (*get_args(hint), hint) if a is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        return kind(value) if kind in (int, float) else value
    except (KeyError, ValueError) as error:
        raise InputError(f"{where} must be {KINDS[kind]}, not {value!r}") from error


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def at_least(least: Mapping[str, float], values: object) -> None:
    """Raises :class:`InputError` if a field that is set lies below its least value."""
    for name, smallest in least.items():
        value = getattr(values, name)
        if value is not None and value < smallest:
            raise InputError(f"{name} must be at least {smallest}, not {value}")
