"""Where and with what a measurement ran."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "hybridspec", "numpy")
ROOT = Path(__file__).resolve().parent.parent


def machine(threads: int) -> dict:
    """Processor, cores, threads, system, versions, and the commit of the source."""
    names = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ())
        if line.startswith("model name")
    ]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_of_this_process": allowed,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(PACKAGES),
        "commit": commit(),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Git's name of the source that runs, with ``+`` when files of it were changed since; None outside a checkout."""
    try:
        name, changes = (
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno", "--", ":!*.json"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}+" if changes else name


def load_average() -> float | None:
    """Of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
