"""Everything the workloads can refuse, as one tree.

WorkloadsError               base; its message says what was found, why it cannot work and what to change
├── WorkloadConfigError      a key, type or combination in a `[workload]` table that cannot work
├── TraceError               a trace that cannot be read; the message begins with file and line
└── SpanError                a span or a range of its tokens that does not exist
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WorkloadsError(Exception):
    """Base of all."""


class WorkloadConfigError(WorkloadsError):
    """The table cannot become a workload; nothing was drawn."""


class TraceError(WorkloadsError):
    """A file or a row of it that cannot become requests; sessions yielded before it stand."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")


class SpanError(WorkloadsError):
    """A span id outside 0 .. 2**63 - 1, or a negative position or count of tokens."""


def choose_from(found: str, choices: Iterable[str]) -> str:
    """The mend for a misspelt name: the nearest choice first, then all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose one of {', '.join(names)}"
