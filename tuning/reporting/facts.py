"""What a profile's numbers depend on, as names and values."""

from collections.abc import Mapping


def facts(profile: dict) -> dict[str, dict[str, str]]:
    """Sections of names and values: what the numbers depend on."""
    about = {name: profile[name] for name in ("hybridspec", "created", "backend")}
    return {
        "Environment": flat(about | profile["machine"]),
        "Target": flat(profile["target"]),
        **{f"Draft {spec}": flat(draft) for spec, draft in profile["drafts"].items()},
        "Settings": flat(profile["settings"]),
    }


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """``{"layers": {"mamba": 3}}`` as ``{"layers.mamba": "3"}``; null as a dash."""
    found: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        elif isinstance(value, list):
            found[key] = ", ".join(map(str, value))
        else:
            found[key] = "-" if value is None else str(value)
    return found
