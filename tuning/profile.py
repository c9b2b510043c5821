"""The profile: what a tuning run found, as it stands in ``profile.json``."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from hybridspec.errors import InputError
from hybridspec.tuning.profile_records import (
    DraftRecord,
    EngineRecord,
    MachineRecord,
    ModelRecord,
    ProfileRecord,
    SettingsRecord,
    WorkloadProfile,
)
from hybridspec.whole_file import write_whole

SCHEMA = 2
FILE = "profile.json"


class Profile(ProfileRecord):
    """What a tuning run found."""

    version: Literal[2] = Field(
        alias="schema", description="Version of this format. Another version is refused when a profile is read."
    )
    hybridspec: str = Field(description="Version of hybridspec that wrote the profile.")
    created: str = Field(description="When it was written, ISO 8601, UTC.")
    backend: Literal["torch", "vllm", "server"] = Field(
        description="What ran the models: hybridspec's own runner, vLLM's offline engine, or a running server."
    )
    target: ModelRecord = Field(description="The target model.")
    drafts: dict[str, DraftRecord] = Field(
        description="Each draft by the name that configurations use for it (`NAME:option=value,...`); a draft "
        "with a model of its own is described like the target."
    )
    machine: MachineRecord = Field(description="Where it was measured.")
    engine: EngineRecord | None = Field(None, description="Backends `vllm` and `server`: what ran the models.")
    left_out: dict[str, Any] | None = Field(
        None, description="Backend `vllm`: drafts that it cannot serve, each with the reason."
    )
    settings: SettingsRecord = Field(
        description="What the command was asked for; a workload may differ, see its own `settings`."
    )
    workloads: dict[str, WorkloadProfile] = Field(description="Each workload by name.")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """A profile file, or the one in a folder.

        Raises:
            InputError: missing, broken or of another version; names the file and the field.
        """
        path = path / FILE if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
            found = json.loads(text)
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read: {error.strerror}. Give a profile.json, or a folder with one."
            ) from error
        except ValueError as error:
            raise InputError(f"{path}: not JSON: {error}") from error
        version = found.get("schema") if isinstance(found, dict) else None
        if version != SCHEMA:
            raise InputError(
                f"{path}: field schema is {version!r}, this version reads {SCHEMA}. Run `hybridspec tune` again."
            )
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise InputError(f"{path}: {_said(error.errors()[0])}") from None

    def save(self, out: Path) -> Path:
        """Writes ``profile.json`` and one ``speculative-config-<workload>.json`` for each workload that speculation
        speeds up, and that vLLM can be given.

        Workloads of an earlier run with the same models are kept, unless this run has them too; a finished result is
        not replaced by an unfinished one. A workload that plain decoding wins gets no file, and an old one is removed.
        """
        out.mkdir(parents=True, exist_ok=True)
        path = out / FILE
        whole = self.joined_with(_earlier(path))
        for name, workload in whole.workloads.items():
            snippet = out / f"speculative-config-{name}.json"
            if workload.vllm and "speculative_config" in workload.vllm:
                write_whole(snippet, json.dumps(workload.vllm.speculative_config) + "\n")
            else:
                snippet.unlink(missing_ok=True)
        write_whole(path, json.dumps(whole.to_dict(), indent=2) + "\n")
        return path

    def joined_with(self, earlier: "Profile | None") -> "Profile":
        """With the drafts of an earlier run on the same target, and those of its workloads that it knows better."""
        if earlier is None or (earlier.target.fingerprint, earlier.target.dtype) != (
            self.target.fingerprint,
            self.target.dtype,
        ):
            return self
        done = {name for name, workload in self.workloads.items() if workload.complete}
        kept = {name: workload for name, workload in earlier.workloads.items() if name not in done}
        fresh = {n: w for n, w in self.workloads.items() if n not in kept or not kept[n].complete}
        drafts = earlier.drafts | self.drafts
        return self.model_copy(update={"workloads": {**kept, **fresh}, "drafts": drafts})


def _earlier(path: Path) -> Profile | None:
    """The profile that stands there; None if there is none that can be read."""
    try:
        return Profile.load(path) if path.is_file() else None
    except InputError:
        return None


def _said(error: ErrorDetails) -> str:
    *place, last = error["loc"]
    if error["type"] == "missing":
        return f"{'.'.join(map(str, place)) or 'the profile'}: {last!r} is a required property"
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}, not {error['input']!r}"
