"""Options of draft-length rules, checked with messages that name rule, option and value."""

from collections.abc import Sequence

from hybridspec.errors import InputError


def checked(rule: str, name: str, value: float, low: float, high: float = float("inf"), whole: bool = False) -> float:
    """``value`` if it is a number within ``low`` and ``high``, both allowed.

    Raises:
        InputError: it is not; names rule, option and value.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low <= value <= high and (not whole or value == int(value)):
        return int(value) if whole else value
    kind = "a whole number" if whole else "a number"
    bounds = f"of at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
    raise InputError(f"{rule}: {name} must be {kind} {bounds}, not {value!r}")


def listed(rule: str, name: str, values: Sequence[float] | str) -> list[float]:
    """Numbers from a sequence or, as on a command line, from text with slashes between them: ``0/2/4``.

    Raises:
        InputError: something else; names rule, option and value.
    """
    parts = values.split("/") if isinstance(values, str) else [values] if isinstance(values, int | float) else values
    try:
        return [float(part) for part in parts]
    except (TypeError, ValueError):
        raise InputError(f"{rule}: {name} must be numbers with slashes between them, not {values!r}") from None
