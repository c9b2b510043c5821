"""What pydantic finds wrong in users' values, said in our words: file and key first, then what is wanted."""

import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hybridspec.errors import InputError

T = TypeVar("T")
#: Kinds of pydantic's errors -> what was wanted.
KINDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "model_type": "a table",
    "dataclass_type": "a table",
}


def _not_empty(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError(EMPTY)
    return value


EMPTY = "is empty"
#: Types of fields that take nothing else: ``"3"`` and ``true`` are no whole numbers. A whole number serves as a number.
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Text = Annotated[str, Strict(), BeforeValidator(_not_empty)]
Folder = Annotated[Path, BeforeValidator(_not_empty)]


def underscored(value: Any) -> Any:
    """A table with underscores for the hyphens in its keys; anything else as it is."""
    return {str(key).replace("-", "_"): v for key, v in value.items()} if isinstance(value, Mapping) else value


def read(kind: type[T], values: Mapping[str, object], where: str) -> T:
    """An instance of a pydantic class; hyphens in keys stand for underscores.

    Args:
        where: file or option that the values come from; begins every message.

    Raises:
        InputError: an unknown key (with the nearest known one), a missing one, or a value of another type or out of
            range.
    """
    try:
        return TypeAdapter(kind).validate_python(underscored(values))
    except ValidationError as error:
        raise InputError(f"{where}: {_said(error.errors()[0], kind)}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


class Settings(BaseModel):
    """Values that are checked when they are made.

    Raises:
        InputError: one is of the wrong type or out of range; names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_said(error.errors()[0], type(self))) from None


def _said(error: ErrorDetails, kind: type) -> str:
    *path, last = error["loc"] or ("",)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = list(_fields(_inside(kind, path)))
        near = difflib.get_close_matches(str(last), known, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(known)}."
        return _placed(path, f"unknown key {last!r}. {hint}")
    place, value = _placed([*path, last], ""), error["input"]
    match error["type"]:
        case "missing" | "missing_argument":
            return f"{place} is missing"
        case "greater_than_equal":
            return f"{place} must be at least {error['ctx']['ge']:g}, not {value}"
        case "finite_number":
            return f"{place} must be a finite number, not {value}"
        case "literal_error":
            known = typing.get_args(_bare(_fields(_inside(kind, path))[str(last)]))
            near = difflib.get_close_matches(str(value), known, 1)
            choice = f"choose one of {', '.join(known)}"
            hint = f"did you mean {near[0]!r}? ({choice})" if near else choice
            return f"{place} is {value!r}: {hint}"
        case "value_error":
            text = str(error["ctx"]["error"])
            return f"{place} {text}" if text.startswith((EMPTY, "must ")) else _placed(error["loc"], text)
        case other if other in KINDS:
            return f"{place} must be {KINDS[other]}, not {shown(value)}"
    return _placed(error["loc"], error["msg"])


def _placed(path: typing.Sequence[str | int], text: str) -> str:
    """``a[0]: b: text``; without ``text``, the place alone."""
    place = ""
    for part in filter(lambda part: part != "", path):
        place += f"[{part}]" if isinstance(part, int) else f"{': ' if place else ''}{part}"
    return f"{place}: {text}" if place and text else place or text


def _fields(kind: Any) -> dict[str, Any]:
    """Names and types of the fields of a pydantic class."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "model_config" and not name.startswith("_")}


def _inside(kind: Any, path: typing.Sequence[str | int]) -> Any:
    """The class of the table at ``path``."""
    for part in path:
        kind = _fields(kind)[part] if isinstance(part, str) else typing.get_args(_bare(kind))[0]
    return _bare(kind)


def _bare(hint: Any) -> Any:
    """Without annotations and without None."""
    while typing.get_origin(hint) is Annotated or type(None) in typing.get_args(hint):
        hint = next(x for x in typing.get_args(hint) if x is not type(None))
    return hint


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def from_text(kind: type, values: Mapping[str, str], where: str) -> dict[str, object]:
    """Values of a command line as what the fields of ``kind`` are; other text, and unknown keys, stay as they are.

    Raises:
        InputError: text that stands for nothing of the kind.
    """
    fields, found = _fields(kind), {}
    for key, text in values.items():
        wanted = _bare(fields.get(key.replace("-", "_"), str))
        try:
            if wanted is bool:
                found[key] = {"true": True, "false": False}[text.lower()]
            else:
                found[key] = wanted(text) if wanted in (int, float) else text
        except (KeyError, ValueError) as error:
            name = {bool: "bool_type", int: "int_type", float: "float_type"}[wanted]
            raise InputError(f"{where}: {key} must be {KINDS[name]}, not {text!r}") from error
    return found
