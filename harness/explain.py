"""`routebench routers`: what there is to route with, and what each policy believes, needs and takes."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from harness.errors import UsageError, choose_from
from harness.peers import PEERS
from routers import POLICIES, RoutersError, policy_explain, policy_help, policy_names


def lines(rows: Iterable[tuple[str, str]]) -> str:
    """A line each, names aligned; a terminal wraps what is too long for it, a pipe gets it whole."""
    known = list(rows)
    width = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"{name:{width}}  {about}".rstrip() for name, about in known)


def list_routers() -> str:
    """Policies of ours, then real routers that can be started."""
    real = [
        (peer.name, f"{peer.about} (a real one; {'installed' if peer.installed else peer.install_line})")
        for peer in PEERS.values()
    ]
    return lines([*((policy, policy_help(policy)) for policy in policy_names()), *real])


def explain_router(name: str) -> RenderableType:
    """One policy in full, or one real router. Raises UsageError for an unknown name."""
    if name in PEERS:
        peer = PEERS[name]
        table = _columns()
        table.add_row("what it is", peer.about)
        table.add_row("variants", ", ".join(f"{name}:{choice}" for choice in peer.choices))
        table.add_row("load.api", ", ".join(peer.apis))
        table.add_row(
            "package", peer.package if peer.installed else f"{peer.package}, not installed: {peer.install_line}"
        )
        return table
    try:
        found = policy_explain(name)
    except RoutersError as error:
        raise UsageError(f"no router named {name!r}: {choose_from(name, [*POLICIES, *PEERS])}") from error
    table = _columns()
    table.add_row("what it does", found.about)
    table.add_row("believes", found.believes)
    table.add_row("needs", ", ".join(sorted(str(need) for need in found.needs)) or "nothing but its own counts")
    table.add_row("fails", found.fails)
    table.add_row("source", found.source)
    if found.variants:
        table.add_row("variants", ", ".join(f"{name}:{variant}" for variant in found.variants))
    if not found.options:
        return Group(Text(name, style="bold"), table)
    # Most options of a policy have one source; it is named once, and others where they are.
    usual = Counter(option.source for option in found.options).most_common(1)[0][0]
    table.add_row("options", usual)
    parts: list[RenderableType] = [Text(name, style="bold"), table]
    for option in found.options:
        source = f" [{option.source}]" if option.source not in ("", usual) else ""
        parts.append(_Item(f"{option.name} = {_written(option.default)}", option.about + source))
    if found.refused:
        parts.append(Text("not built, each with the reason"))
        for option_name, why in found.refused.items():
            parts.append(_Item(option_name, why))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Item:
    """A name and what it means, as one paragraph: beside long names an 80-column terminal has no second column."""

    name: str
    about: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = f"{self.name}: {self.about}"
        yield Text(textwrap.fill(whole, options.max_width, subsequent_indent="    ", break_on_hyphens=False))


def _written(value: Any) -> str:
    """A default as a scenario would have it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_written(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return "unset" if value is None else json.dumps(value)


def _columns() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
