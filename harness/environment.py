"""Where a run was made: what a reader needs to judge or repeat it. Never part of what must be equal."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("routebench", "locust", "aiohttp", "pyzmq", "numpy", "pandas", "pyarrow")


def environment() -> dict[str, Any]:
    """Versions, machine and load. Unknown is None."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def package_version(package: str) -> str | None:
    """The installed version, or None for code that runs from a checkout without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the code that runs, when it runs from a checkout."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
