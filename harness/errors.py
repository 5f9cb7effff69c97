"""Everything the harness can refuse or lose, as one tree.

HarnessError                 base; a command prints its message as one line and exits with `exit_code`
├── UsageError        (2)    a scenario, option or name that cannot work, found before anything starts
├── StartError        (2)    a process that did not come up, or a served one that went away
├── OutputError       (2)    results that could not be written; what was written before stays
├── PolicyError       (2)    a policy that broke down while it decided or listened
└── ProcessLost       (3)    a process that ended while it was needed; the data until then are kept
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HarnessError(Exception):
    """Base of all: the message says what was found, why it cannot work and what to change."""

    exit_code = 2


class UsageError(HarnessError):
    """The request itself cannot work; nothing was started."""


class StartError(HarnessError):
    """A child process is not there; everything started before it has been stopped."""


class PolicyError(HarnessError):
    """A routing policy raised, or chose what it may not: its own code must change."""


class OutputError(HarnessError):
    """The results folder cannot take what was measured."""


class ProcessLost(HarnessError):
    """A child process ended during a measurement; what it measured until then was kept."""

    exit_code = 3


def choose_from(found: str, choices: Iterable[str]) -> str:
    """The mend for a misspelt name: the nearest choice first, then all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose one of {', '.join(names)}"
