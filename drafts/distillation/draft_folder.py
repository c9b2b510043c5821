"""The folder of a draft: an ordinary checkpoint, and in ``training/`` what a later call goes on from."""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybridspec.errors import InputError
from hybridspec.whole_file import write_whole


@dataclass
class DistillationState:
    """What ``training/state.json`` holds.

    Attributes:
        known: what later calls must have in common with the first one.
        held_out: measurements by name (``before``, ``after``), each with the key that it was made for.
        losses: of the latest training step; None before one.
        output_seconds: time that went into the target's outputs.
        fresh_tokens: tokens that training has met, each counted once.
    """

    known: dict
    held_out: dict[str, dict] = field(default_factory=dict)
    losses: dict[str, float] | None = None
    output_seconds: float = 0.0
    fresh_tokens: int = 0


class DraftFolder:
    """A folder to write a draft into, and its ``state``: that of earlier calls, or a fresh one.

    Args:
        path: the folder.
        known: what an earlier call must have had alike.
        target: folder of the target, which this must not be; None if it has none.

    Raises:
        InputError: the folder holds something else, cannot be written, or was begun with something else.
    """

    def __init__(self, path: Path, known: dict, target: Path | None) -> None:
        self.path, self.training = path, path / "training"
        self._record = self.training / "state.json"
        if target and path.resolve() == target:
            raise InputError(f"--out {path}: is the target itself. Choose another folder.")
        if not self._record.is_file() and (path / "config.json").exists():
            raise InputError(
                f"--out {path}: holds a checkpoint, and nothing that its training could go on from. "
                "Choose another folder."
            )
        try:
            self.training.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {path}: cannot make this folder: {error.strerror}") from error
        if not os.access(self.training, os.W_OK):
            raise InputError(f"--out {path}: this folder is not writable. Choose another.")
        self.state = self._read(known) if self._record.is_file() else DistillationState(known)

    def _read(self, known: dict) -> DistillationState:
        with self.going_on(self._record):
            state = DistillationState(**json.loads(self._record.read_text(encoding="utf-8")))
        for name, value in known.items():
            if state.known[name] != value:
                raise InputError(
                    f"--out {self.path}: begun with another {name.replace('_', ' ')} ({_short(state.known[name])}, "
                    f"now {_short(value)}). Choose another folder, or the same {name.replace('_', ' ')}."
                )
        return state

    @contextmanager
    def going_on(self, file: Path) -> Iterator[None]:
        """Turns whatever is wrong with a file of an earlier call into an :class:`InputError`."""
        try:
            yield
        except Exception as error:
            raise InputError(
                f"{file}: training cannot go on from it ({error}). Delete the folder {self.path}, or choose another."
            ) from error

    def save_state(self) -> None:
        write_json(self._record, dataclasses.asdict(self.state))


def write_json(path: Path, content: dict) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)
