"""JSON files and safetensors headers, read without trust: broken input gives findings, never a crash, and no weight or
pickle is ever opened.
"""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hybridspec.checkpoints.findings import Finding, Subject

INDEX = "model.safetensors.index.json"
#: The format's own limit.
LONGEST_HEADER = 100_000_000
#: Bits of each type of the format.
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
LFS_POINTER = b"version https://git-lfs"
SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its header describes it; ``nbytes`` is what it takes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    nbytes: int

    @property
    def count(self) -> int:
        return prod(self.shape)


def read_json(folder: Path, name: str, subject: Subject, findings: list[Finding]) -> dict[str, Any] | None:
    """The object in a JSON file of the checkpoint; None if it is absent, or broken, which adds HS003."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:
        findings.append(Finding("HS003", subject, f"{name} is not valid JSON: {error}.", name))
        return None
    if not isinstance(value, dict):
        findings.append(Finding("HS003", subject, f"{name} holds a {type(value).__name__}, not an object.", name))
        return None
    return value


class HeaderError(Exception):
    """A header is not what the format demands; carries the code of the finding."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header alone.

    Raises:
        HeaderError: the file is cut short, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if (start + file.read(len(LFS_POINTER) - 8)).startswith(LFS_POINTER):
            raise HeaderError("HS013", f"{path.name} is a Git LFS pointer of {size} bytes.")
        if len(start) < 8:
            raise HeaderError("HS006", f"{path.name} has {size} bytes, not even a length.")
        (length,) = struct.unpack("<Q", start)
        if length > LONGEST_HEADER:
            raise HeaderError("HS006", f"{path.name} claims a header of {length} bytes: no safetensors file.")
        file.seek(8)
        text = file.read(length)
    if len(text) < length:
        raise HeaderError("HS006", f"{path.name} ends inside its header: {len(text)} of {length} bytes.")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(name, entry, path.name) for name, entry in entries.items()}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise HeaderError("HS006", f"{path.name} has a header that is no list of tensors: {error}.") from error
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size < 8 + length + end:
        missing = 8 + length + end - size
        last = max(entries, key=lambda name: entries[name]["data_offsets"][1])
        raise HeaderError("HS007", f"{path.name} lacks its last {missing} bytes of {8 + length + end}; {last} is cut.")
    return tensors


def _entry(name: str, entry: Mapping[str, Any], file: str) -> TensorInfo:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not all(type(x) is int and x >= 0 for x in (*shape, begin, end)) or end < begin:
        raise ValueError(f"{name} is described as {json.dumps(entry)[:80]}")
    if dtype in BITS and prod(shape) * BITS[dtype] != (end - begin) * 8:
        raise ValueError(f"{name} of type {dtype} and shape {shape} takes {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), file, end - begin)


@dataclass(frozen=True)
class Weights:
    """All tensors of a checkpoint; ``whole`` is False if some could not be read, so that absence proves nothing."""

    tensors: dict[str, TensorInfo]
    whole: bool

    @property
    def parameters(self) -> int:
        return sum(tensor.count for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_weights(folder: Path, subject: Subject, findings: list[Finding]) -> Weights:
    """Headers of all files that a loader would read, with findings about files that are missing or broken."""
    index = read_json(folder, INDEX, subject, findings)
    if index is None and (folder / INDEX).is_file():
        return Weights({}, False)
    places = index.get("weight_map") if index else None
    if index is not None and not isinstance(places, dict):
        findings.append(Finding("HS003", subject, f"{INDEX} has no weight_map.", INDEX, "weight_map"))
        return Weights({}, False)
    if places is None:
        names = _unindexed(folder, subject, findings)
    else:
        outside = sorted({str(n) for n in places.values() if not isinstance(n, str) or os.path.basename(n) != n})
        if outside:
            seen = f"{INDEX} names a file outside the folder: {outside[0]}."
            findings.append(Finding("HS009", subject, seen, INDEX, "weight_map"))
        names = sorted({n for n in places.values() if isinstance(n, str) and n not in outside})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        seen = f"{len(missing)} of {len(names)} weight files are missing: {shown}."
        findings.append(Finding("HS008", subject, seen, missing[0]))
    tensors: dict[str, TensorInfo] = {}
    whole = not missing
    for name in names:
        if name in missing:
            continue
        try:
            found = read_header(folder / name)
        except HeaderError as error:
            findings.append(Finding(error.code, subject, str(error), name))
            whole = False
            continue
        except OSError as error:
            findings.append(Finding("HS006", subject, f"{name} cannot be opened: {error}.", name))
            whole = False
            continue
        tensors |= found
    if places is not None and whole:
        findings += _against_index(places, tensors, subject)
    if not names:
        whole = False
        findings += _no_weights(folder, subject)
    return Weights(tensors, whole)


def _unindexed(folder: Path, subject: Subject, findings: list[Finding]) -> list[str]:
    """The files of a checkpoint without an index: one, or numbered shards, of which all should be there."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    shards = [match for match in map(SHARD_NAME.match, names) if match]
    if not shards:
        # Adapters and copies in another layout lie beside the weights now and then.
        return [n for n in names if not n.startswith(("adapter", "consolidated"))] or names
    findings.append(
        Finding(
            "HS009",
            subject,
            f"{len(shards)} numbered weight files, and no {INDEX} that says what is in which.",
            INDEX,
            action=f"Copy {INDEX} from the model's source.",
        )
    )
    first = shards[0]
    return [f"{first['stem']}-{i:05d}-of-{first['count']}.safetensors" for i in range(1, int(first["count"]) + 1)]


def _against_index(places: Mapping[str, str], tensors: Mapping[str, TensorInfo], subject: Subject) -> list[Finding]:
    lost = sorted(name for name, file in places.items() if name not in tensors or tensors[name].file != file)
    unlisted = sorted(tensors.keys() - places.keys())
    found = []
    if lost:
        seen = f"{INDEX} places {len(lost)} tensors where they are not, first {lost[0]} in {places[lost[0]]}."
        found.append(Finding("HS009", subject, seen, INDEX, lost[0]))
    elif unlisted:
        seen = f"{len(unlisted)} tensors are in the files and not in {INDEX}, first {unlisted[0]}."
        found.append(Finding("HS009", subject, seen, INDEX, unlisted[0]))
    return found


def _no_weights(folder: Path, subject: Subject) -> list[Finding]:
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for path in folder.glob(pattern)
    )
    if pickles:
        return [Finding("HS005", subject, f"The weights are pickles ({pickles[0]}); they were not opened.", pickles[0])]
    return [Finding("HS004", subject, "The folder has no *.safetensors.")]
