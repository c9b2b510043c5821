"""Profile files: a versioned JSON schema, checked when a file is read, and merged when one is written."""

import json
from functools import cache
from pathlib import Path

import jsonschema

from hybridspec.errors import InputError

SCHEMA = 2
FILE = "profile.json"


@cache
def schema() -> dict:
    return json.loads((Path(__file__).with_name("profile-schema.json")).read_text())


def read_profile(path: Path) -> dict:
    """A profile file, or the one in a folder, checked against its schema.

    Raises:
        InputError: missing, broken or of another version; names the file and the field.
    """
    path = path / FILE if path.is_dir() else path
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}. Give a profile.json, or a folder with one."
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    found = profile.get("schema") if isinstance(profile, dict) else None
    if found != SCHEMA:
        raise InputError(
            f"{path}: field schema is {found!r}, this version reads {SCHEMA}. Run `hybridspec tune` again."
        )
    problem = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema()).iter_errors(profile))
    if problem is not None:
        where = ".".join(map(str, problem.absolute_path)) or "the profile"
        raise InputError(f"{path}: {where}: {problem.message}")
    return profile


def write_profile(profile: dict, out: Path) -> Path:
    """Writes ``profile.json`` and one ``speculative-config-<workload>.json`` for each workload that speculation
    speeds up, and that vLLM can be given.

    Workloads of an earlier run with the same models are kept, unless this run has them too; a finished result is not
    replaced by an unfinished one. A workload that plain decoding wins gets no file, and an old one is removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    if path.is_file():
        try:
            earlier = read_profile(path)
        except InputError:
            earlier = None
        if earlier and all(earlier["target"].get(k) == profile["target"][k] for k in ("fingerprint", "dtype")):
            kept = {
                n: w for n, w in earlier["workloads"].items() if not profile["workloads"].get(n, {}).get("complete")
            }
            fresh = {n: w for n, w in profile["workloads"].items() if n not in kept or not kept[n]["complete"]}
            profile["workloads"] = {**kept, **fresh}
            profile["drafts"] = {**earlier["drafts"], **profile["drafts"]}
    for name, workload in profile["workloads"].items():
        snippet = out / f"speculative-config-{name}.json"
        if workload["vllm"] and "speculative_config" in workload["vllm"]:
            _replace(snippet, json.dumps(workload["vllm"]["speculative_config"]) + "\n")
        else:
            snippet.unlink(missing_ok=True)
    _replace(path, json.dumps(profile, indent=2) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
