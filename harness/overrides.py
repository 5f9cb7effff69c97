"""`--set KEY=VALUE`: one value of a scenario's or a workload's table, put where its key leads.

Dots lead into tables, and whole numbers into lists: `churn.0.replica`, `routers.1.options.temperature`. A value is read
as TOML, and is text where it is none. A table on the way that is not there is made; an entry of a list never is.
"""

from __future__ import annotations

import tomllib
from typing import Any

from harness.errors import UsageError


def apply_override(table: dict[str, Any], override: str) -> None:
    """Sets one `key=value` in a table. Raises UsageError."""
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or "\n" in override:
        raise UsageError(f"--set {override!r}: write key=value on one line, such as --set load.concurrency=8")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        parsed = value
    place: Any = table
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        if isinstance(place, list):
            place = place[_entry(place, parent, parents[:depth], override)]
        else:
            place = place.setdefault(parent, {})
        if not isinstance(place, dict | list):
            raise UsageError(
                f"--set {override!r}: {parent!r} is a value, not a table: name a key that has keys below it"
            )
    if isinstance(place, list):
        place[_entry(place, last, parents, override)] = parsed
    else:
        place[last] = parsed


def _entry(place: list[Any], number: str, path: list[str], override: str) -> int:
    """A number as the place of an entry that is there. Raises UsageError."""
    if not (number.isascii() and number.isdigit() and int(number) < len(place)):
        there = f"0 to {len(place) - 1}" if place else "none"
        raise UsageError(
            f"--set {override!r}: {'.'.join(path)} is a list, and {number!r} is no entry of it: give the number of one "
            f"({there}), or set the whole list"
        )
    return int(number)
