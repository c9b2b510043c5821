"""Configuration files of ``hybridspec tune``: TOML, checked whole before anything is loaded."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from hybridspec import embedded
from hybridspec.embedded import workload_files
from hybridspec.errors import InputError
from hybridspec.specs import STRATEGIES, split_options
from hybridspec.tuning.config import TuneConfig
from hybridspec.tuning.validation import read
from hybridspec.tuning.workloads.rows import SUFFIXES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: What a configuration file calls the embedded target.
EMBEDDED = "embedded"
#: Strategies whose first option is a folder.
FOLDER_FIRST = ("same-architecture", "mtp")


def load_config(path: Path) -> TuneConfig:
    """Reads and checks a file. Relative paths in it are relative to its folder.

    Raises:
        InputError: no such file, not TOML, an unknown key (with the nearest known one) or a wrong value; names file and
            key.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error
    folder = path.resolve().parent
    if table.get("target") == EMBEDDED:
        del table["target"]
    # What is of another type than these is refused with its key when it is read.
    if isinstance(table.get("drafts"), list):
        table["drafts"] = [_draft_paths(d, folder) if isinstance(d, str) else d for d in table["drafts"]]
    for key in ("target", "out"):
        if isinstance(table.get(key), str) and table[key].strip():
            table[key] = absolute(table[key], folder)
    if isinstance(table.get("storage"), str) and "://" not in table["storage"]:
        table["storage"] = absolute(table["storage"], folder)
    config = read(TuneConfig, table, str(path))
    sources = tuple(replace(w, source=_workload_path(w.source, folder)) for w in config.workloads)
    if sources:
        config = config.model_copy(update={"workloads": sources})
    return config.read_from(path)


def _draft_paths(spec: str, folder: Path) -> str:
    """Option values that are paths, made absolute: folders of drafts, values with a slash in them, and those that name
    something there.
    """
    name, _, options = spec.partition(":")
    if not options:
        return absolute(spec, folder) if name not in STRATEGIES.names() and (folder / spec).is_dir() else spec
    parts = []
    for part, key, value in split_options(options):
        is_folder = key == "path" or (key is None and name in FOLDER_FIRST)
        relative = value not in embedded.DRAFTS and (is_folder or "/" in value or (folder / value).exists())
        if relative:
            part = absolute(value, folder) if key is None else f"{key}={absolute(value, folder)}"
        parts.append(part)
    return f"{name}:{','.join(parts)}"


def _workload_path(source: str, folder: Path) -> str:
    """A file or folder, made absolute; embedded names and data sets of the local cache stay as they are."""
    path = Path(absolute(source, folder))
    is_path = path.exists() or path.suffix.lower() in SUFFIXES or source.startswith((".", "~"))
    return str(path) if is_path and source not in workload_files() else source


def absolute(path: str | Path, folder: Path) -> str:
    # Not resolve: a link keeps the name that the user gave it.
    return os.path.normpath(folder / Path(path).expanduser())
