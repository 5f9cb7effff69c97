"""Checks that the five packages come from one place.

Their import names are short and generic, so another project's `routers` or `reports` on the path would be taken
instead of ours; that is found here, before anything else is imported, and said with its mend.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOMS = ("harness", "mock_engine", "reports", "routers", "workloads")


def stranger() -> str | None:
    """A one-line error if a package of ours is shadowed by a foreign one, else None."""
    home = Path(__file__).resolve().parent.parent
    for room in ROOMS:
        spec = find_spec(room)
        origin = spec.origin if spec else None
        if origin is None:
            return (
                f"the package {room!r} of routebench is missing beside {home}: "
                "reinstall with `pip install --force-reinstall routebench`"
            )
        if Path(origin).resolve().parent.parent != home:
            return (
                f"the package {room!r} comes from {Path(origin).parent}, not from {home}: a foreign package of "
                "that name is found first; run routebench in a virtual environment of its own and outside that "
                "folder (check PYTHONPATH and the working directory)"
            )
    return None
