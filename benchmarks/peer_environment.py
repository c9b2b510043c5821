"""The environment that peers from PyPI run in: a venv of their own, beside the one that runs this.

Peers pin other versions than this project, so they never become its dependencies. torch and everything else that they
do not pin comes from the running environment, through a ``.pth`` file: both sides run the same build of it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

#: economize 0.3.2 keeps its own cache class; from 5.21 on, Qwen3.5's layers ask a cache for more than it has.
PEERS = ("economize==0.3.2", "transformers==5.20.2")
MADE = "hybridspec-peers.txt"


class EnvironmentNotMade(Exception):
    """The message says why, and what to do."""


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridspec-benchmarks" / "peers"


def make(folder: Path, packages: Sequence[str] = PEERS, say: Callable[[str], None] = print) -> Path:
    """The interpreter of the environment in ``folder``, which is made when it is missing or holds something else.

    Raises:
        EnvironmentNotMade: ``folder`` holds other files, or pip could not install the packages.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    running = sysconfig.get_path("purelib")
    wanted = "\n".join([sys.version, running, *packages, ""])
    made = folder / MADE
    if made.is_file() and made.read_text() == wanted:
        return python
    if folder.exists():
        if not (folder / "pyvenv.cfg").is_file() and any(folder.iterdir()):
            raise EnvironmentNotMade(f"{folder} holds files of something else: name another folder with --peers")
        shutil.rmtree(folder)
    say(f"making the peers' environment in {folder}: {', '.join(packages)}")
    venv.create(folder, with_pip=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (own / "running_environment.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    )
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    installed = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if installed.returncode:
        last = installed.stderr.strip().splitlines()[-3:]
        raise EnvironmentNotMade(
            f"pip could not install {' '.join(packages)} into {folder}:\n" + "\n".join(last) + "\n"
            "Is a package index reachable? --without-peers leaves them out."
        )
    made.write_text(wanted)
    return python
