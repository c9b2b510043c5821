"""Profile files, as functions."""

from pathlib import Path

from hybridspec.tuning.profile import Profile


def read_profile(path: Path) -> Profile:
    """See :meth:`hybridspec.tuning.profile.Profile.load`."""
    return Profile.load(path)


def write_profile(profile: Profile, out: Path) -> Path:
    """See :meth:`hybridspec.tuning.profile.Profile.save`."""
    return profile.save(out)
