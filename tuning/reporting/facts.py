"""What a profile's numbers depend on, as names and values."""

from collections.abc import Mapping

from hybridspec.tuning.profile import Profile


def facts(profile: Profile) -> dict[str, dict[str, str]]:
    """Sections of names and values: what the numbers depend on."""
    about = {"hybridspec": profile.hybridspec, "created": profile.created, "backend": profile.backend}
    return {
        "Environment": flat(about | profile.machine.to_dict()),
        "Target": flat(profile.target.to_dict()),
        **{f"Draft {spec}": flat(draft.to_dict()) for spec, draft in profile.drafts.items()},
        "Settings": flat(profile.settings.to_dict()),
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
