"""Workloads: named sets of prompts, embedded ones, files, and data sets of the local cache."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hybridspec.embedded import workload_files
from hybridspec.errors import InputError
from hybridspec.specs import split_options
from hybridspec.tuning.fields import at_least, fill
from hybridspec.tuning.workloads.cached_datasets import dataset_rows
from hybridspec.tuning.workloads.messages import read_messages
from hybridspec.tuning.workloads.rows import SUFFIXES, TEXT, Row, read_rows, read_text

#: Columns that are looked for when none is named, in this order.
COLUMNS = ("prompt", "messages")
#: The embedded questions as their target's template writes them; other targets have other markers.
WRITTEN_OUT = re.compile(r"<\|user\|>\n(.*)\n<\|assistant\|>\n", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """One prompt, ``text`` or chat ``messages`` (``role`` and ``content`` each); ``id`` names it in results."""

    id: str
    text: str = ""
    messages: tuple[dict[str, object], ...] = ()

    @property
    def content(self) -> str | tuple[dict[str, object], ...]:
        """Whichever of the two it is."""
        return self.messages or self.text


@dataclass(frozen=True)
class Workload:
    """A set of prompts that one configuration is chosen for; what is None is left to the command.

    Attributes:
        count: prompts to use; :meth:`choose` takes them.
        seed: draws the prompts at random instead of spreading them evenly.
        max_new_tokens: tokens generated for each prompt.
        temperature: 0 is greedy.
        skip_unusable: prompts that do not fit into the model's context are left out instead of refused.
        left_out: rows without a usable prompt that were left out when the file was read.
    """

    name: str
    prompts: tuple[Prompt, ...]
    count: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    skip_unusable: bool = False
    left_out: int = 0

    def choose(self, count: int) -> list[Prompt]:
        """The prompts to use: ``count`` of them, unless the workload says how many itself."""
        return choose_prompts(self.prompts, self.count or count, self.seed)


@dataclass(frozen=True)
class WorkloadSource:
    """Where a workload comes from and how it is run: what ``--workload`` and the tables of a configuration file say.

    Attributes:
        source: an embedded name; a file (JSON Lines, CSV, Parquet, text); a folder of text files, one prompt in each;
            or what the ``datasets`` library has: a folder, or ``owner/name`` of the local cache.
        name: in results; else the embedded name or the file's.
        column: holds the prompts, as text or as chat messages; else ``prompt`` or ``messages``, whichever there is.
        chat: each text is one user message, and the target's chat template goes round it. The embedded questions then
            lose the markers of the embedded target.
        split, subset: of a data set.
        prompts: how many to use; with ``seed`` drawn at random, otherwise spread evenly over the file.
        number_rows: prompts are called after their rows even if there is a column ``id``.

    The others are as in :class:`Workload`.
    """

    source: str
    name: str | None = None
    column: str | None = None
    chat: bool = False
    split: str | None = None
    subset: str | None = None
    prompts: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    skip_unusable: bool = False
    number_rows: bool = False

    def __post_init__(self) -> None:
        at_least({"prompts": 1, "seed": 0, "max_new_tokens": 2, "temperature": 0}, self)

    @classmethod
    def parse(cls, spec: str) -> "WorkloadSource":
        """From ``SOURCE`` or ``SOURCE:option=value,...``: ``faq.csv:column=question,max_new_tokens=128,name=faq``.

        Raises:
            InputError: an unknown or malformed option; says which exist.
        """
        # The colon that options follow, not one of a drive or of a split such as train[:100].
        source, options = (*re.split(r":(?=[A-Za-z_-]+=)", spec, maxsplit=1), "")[:2]
        values: dict[str, object] = {"source": source}
        for part, key, value in split_options(options):
            if not key or not value or key == "source":
                raise InputError(f"workload {spec!r}: {part!r} is no option. Write key=value, with commas between.")
            values[key] = value
        return fill(cls, values, f"workload {spec!r}", text=True)

    def load(self) -> Workload:
        """Reads the prompts.

        Raises:
            InputError: nothing there, a bad row (names file, line and field), or no usable prompt.
        """
        where, stem, rows = self._rows()
        prompts, left_out = _prompts(rows, where, stem, self)
        if not prompts and left_out:
            raise InputError(f"{where}: none of its {len(left_out)} rows holds a usable prompt. First: {left_out[0]}")
        if not prompts:
            raise InputError(f'{where}: no prompts in it. Give one {{"prompt": "..."}} object per line, or a table.')
        return Workload(
            self.name or stem,
            tuple(prompts),
            self.prompts,
            self.seed,
            self.max_new_tokens,
            self.temperature,
            self.skip_unusable,
            len(left_out),
        )

    def _rows(self) -> tuple[str, str, Iterable[Row]]:
        """What messages call it, what prompts are called after, and the rows."""
        embedded, path = workload_files(), Path(self.source)
        if self.source in embedded:
            return str(embedded[self.source]), self.source, read_rows(embedded[self.source])
        if path.is_dir():
            if texts := sorted(p for p in path.iterdir() if p.suffix.lower() in TEXT and p.is_file()):
                return str(path), path.name, _text_files(texts)
            return str(path), path.name, dataset_rows(self.source, self.split, self.subset)
        if path.is_file() or path.suffix.lower() in SUFFIXES:
            return str(path), path.stem, read_rows(path)
        if self.split or self.subset or re.fullmatch(r"[\w.-]+/[\w.-]+", self.source):
            return self.source, self.source.split("/")[-1], dataset_rows(self.source, self.split, self.subset)
        raise InputError(
            f"no embedded workload {self.source!r}, and no such file: choose {', '.join(embedded)}, or give a file "
            f"({', '.join(SUFFIXES)}), a folder, or a data set of the local cache as owner/name or NAME:split=..."
        )


def find_workload(spec: "str | WorkloadSource") -> Workload:
    """The workload that ``spec`` names, as :meth:`WorkloadSource.parse` reads it."""
    return (WorkloadSource.parse(spec) if isinstance(spec, str) else spec).load()


def find_workloads(specs: "Iterable[str | WorkloadSource]") -> list[Workload]:
    """Several workloads for one run.

    Raises:
        InputError: two have one name, under which results are kept.
    """
    workloads = [find_workload(spec) for spec in specs]
    names = [w.name for w in workloads]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two workloads are called {twice!r}: give one another name, SOURCE:name=...")
    return workloads


def load_workload(path: Path, **options: object) -> Workload:
    """The workload in a file; options are those of :class:`WorkloadSource`."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder. Give a file.")
    if not path.is_file():
        raise InputError(f"{path}: no such workload file")
    return WorkloadSource(str(path), **options).load()


T = TypeVar("T")


def choose_prompts(prompts: Sequence[T], count: int, seed: int | None = None) -> list[T]:
    """``count`` prompts in the order of the file: spread evenly over it, or drawn with a seed."""
    order = preference(len(prompts), count, seed)
    return [prompts[i] for i in sorted(order[:count])]


def preference(length: int, count: int, seed: int | None = None) -> list[int]:
    """Every index below ``length``: first the ``count`` to take, then those that can stand in for one of them."""
    if seed is not None:
        order = list(range(length))
        random.Random(seed).shuffle(order)
        return order
    chosen = [i * length // count for i in range(count)] if count < length else list(range(length))
    return [*chosen, *sorted(set(range(length)) - set(chosen))]


def _text_files(paths: Sequence[Path]) -> Iterable[Row]:
    for number, path in enumerate(paths, 1):
        yield Row(number, path.name, {"id": path.stem, "prompt": read_text(path)})


def _prompts(rows: Iterable[Row], where: str, stem: str, source: WorkloadSource) -> tuple[list[Prompt], list[str]]:
    """The prompts, and why rows were left out."""
    prompts: list[Prompt] = []
    left_out: list[str] = []
    places: dict[str, str] = {}
    for row in rows:
        place = f"{where}, {row.place}"
        column = source.column or next((c for c in COLUMNS if row.fields.get(c) is not None), COLUMNS[0])
        if column not in row.fields:
            raise InputError(
                f'{place}: field "{column}" is missing. There are: {", ".join(map(str, row.fields)) or "none"}. '
                "Name the one that holds the prompts with column=..."
            )
        try:
            text, messages = _content(row.fields[column], column, source.chat)
        except ValueError as error:
            if not source.skip_unusable:
                raise InputError(
                    f'{place}: field "{column}" {error}. (skip_unusable=true leaves such rows out.)'
                ) from error
            left_out.append(f'{row.place}: field "{column}" {error}')
            continue
        name = None if source.number_rows else row.fields.get("id")
        name = f"{stem}-{row.number}" if name is None or name == "" else str(name)
        if name in places:
            raise InputError(
                f'{place}: field "id" is {name!r}, as in {places[name]}. Each prompt needs its own; '
                "number_rows=true calls them after their rows."
            )
        places[name] = row.place
        prompts.append(Prompt(name, text, messages))
    return prompts, left_out


def _content(value: object, column: str, chat: bool) -> tuple[str, tuple[dict[str, object], ...]]:
    """Text or messages; raises ValueError with what is wrong."""
    if isinstance(value, list) or (column == "messages" and isinstance(value, str)):
        messages = read_messages(value)
        for message in messages:
            _check_characters(str(message["content"]))
        return "", messages
    if not isinstance(value, str):
        raise ValueError("is not text" if value is not None else "is empty")
    if not value.strip():
        raise ValueError("is empty")
    _check_characters(value)
    if not chat:
        return value, ()
    written_out = WRITTEN_OUT.fullmatch(value)
    return "", ({"role": "user", "content": written_out[1] if written_out else value},)


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"holds half a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start}), which is no text"
        ) from error
