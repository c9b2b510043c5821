"""Where studies are kept: a SQLite file by default, any Optuna storage URL, or a journal file; and trials whose
process is gone.
"""

import os
import socket
import time
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from sqlalchemy.exc import ArgumentError, DatabaseError, IntegrityError, OperationalError

from hybridspec.errors import InputError

WORKER = "worker"
#: A trial of another machine that has run for longer belongs to a worker that is gone.
STALE_SECONDS = 3600.0


def open_storage(out: Path, url: str | None = None) -> BaseStorage:
    """The storage at ``url`` (an RDB URL, or the path of a journal file), by default ``study.db`` in ``out``.

    The folder ``out`` is made.

    Raises:
        InputError: the folder cannot be made or written to, or the storage cannot be opened.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot make this folder: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise InputError(f"--out {out}: this folder is not writable. Choose another.")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = url or f"sqlite:///{out / 'study.db'}"
    try:
        if "://" not in where:
            return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(where))
        # Several processes may write: wait for each other instead of failing.
        options = {"connect_args": {"timeout": 60}} if where.startswith("sqlite") else {}
        return _database(where, options)
    except (DatabaseError, OperationalError, ArgumentError, optuna.exceptions.StorageInternalError) as error:
        raise InputError(f"{where.removeprefix('sqlite:///')}: not a readable Optuna study ({error}).{HINT}") from error
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"{where}: cannot be opened as an Optuna storage: {error}") from error


def _database(where: str, options: dict, tries: int = 20) -> BaseStorage:
    """Two processes that make the tables of a new file at once trip over each other: the later one looks again."""
    for left in reversed(range(tries)):
        try:
            return optuna.storages.RDBStorage(where, engine_kwargs=options)
        except (OperationalError, IntegrityError) as error:
            if not left or not any(words in str(error) for words in ("already exists", "locked", "UNIQUE")):
                raise
            time.sleep(0.1)
    raise AssertionError("unreachable")


HINT = " Move it away, or choose another --out."


def this_worker() -> dict[str, object]:
    """What a trial notes of the process that runs it."""
    return {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}


def close_abandoned(study: optuna.Study) -> int:
    """Fails the running trials whose process is gone, as a killed one leaves them; how many there were."""
    count = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
        worker = trial.user_attrs.get(WORKER)
        if worker is None or not _lives(worker):
            study.tell(trial.number, state=TrialState.FAIL)
            count += 1
    return count


def _lives(worker: dict) -> bool:
    if worker["host"] != socket.gethostname():
        return time.time() - worker["since"] < STALE_SECONDS
    if worker["process"] == os.getpid():
        return False
    try:
        os.kill(worker["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
