"""`routebench scenarios --keys TABLE`: what may stand in a scenario, read from the structs that check it.

A key, its default, its kind and what stands beside it in the source, as a docstring below the field or a comment behind
it: so this reference cannot lag behind. Distributions are the table `dist`, and every workload kind is one of its own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from harness.churn import ChurnEntry
from harness.drive import Load, Stage
from harness.errors import UsageError, choose_from
from harness.expect import Expectation
from harness.faults import ROUTER_PREFIX
from harness.fleet_table import Fleet
from harness.ingress import RouterSetup
from harness.peers import PLACEHOLDERS
from harness.router_entry import RouterEntry
from mock_engine import EngineConfig, Faults
from routers import RouterFaults
from workloads import WORKLOADS

TABLES: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "load": ("[load]", Load),
    "load.stages": ("one of load.stages", Stage),
    "routers": ("one of routers = [...]", RouterEntry),
    "router": ("[router]", RouterSetup),
    "fleet": ("[fleet]", Fleet),
    "engine": ("[engine], which also has preset", EngineConfig),
    "churn": ("one [[churn]]", ChurnEntry),
    "faults": ("[faults] of engines, which also has replicas", Faults),
    "faults.router": ("[faults] of routers", RouterFaults),
    "expect": ("one [[expect]]", Expectation),
    **{name: (f'[workload] with kind = "{name}"', kind) for name, kind in WORKLOADS.items()},
}
DISTRIBUTIONS = "dist"
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "nothing"}


def keys_text(name: str, width: int = 100) -> str:
    """The keys of one table. Raises UsageError for a table that there is not."""
    if name == DISTRIBUTIONS:
        return "\n".join(
            f'{{ dist = "{kind.__struct_config__.tag}", {", ".join(_keys_of(kind))} }}\n'
            + textwrap.indent(textwrap.fill(inspect.cleandoc(kind.__doc__ or ""), width - 4), "    ")
            for kind in distributions()
        )
    if name not in TABLES:
        raise UsageError(f"no table named {name!r}: {choose_from(name, [*TABLES, DISTRIBUTIONS])}")
    title, struct = TABLES[name]
    prefix = ROUTER_PREFIX if struct is RouterFaults else ""
    lines = [title]
    hints, notes = get_type_hints(struct), _notes(struct)
    for field in msgspec.structs.fields(struct):
        default = "" if field.required else f" = {_default(field)}"
        lines.append(f"{prefix}{field.encode_name}{default}  ({kind_in_words(hints[field.name])})")
        if note := notes.get(field.name):
            lines.append(textwrap.indent(textwrap.fill(note, width - 4, break_on_hyphens=False), "    "))
    if struct is RouterEntry:
        lines += ["in command and args:", *(f"    {{{name}}}: {about}" for name, about in PLACEHOLDERS.items())]
    return "\n".join(lines)


def distributions() -> list[type[msgspec.Struct]]:
    """The kinds that a number of a workload may be spread by."""
    turns = get_type_hints(WORKLOADS["multi-turn"])["turns"]
    return [kind for kind in get_args(turns) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _keys_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    for field in sorted(msgspec.structs.fields(kind), key=lambda one: not one.required):
        yield field.encode_name if field.required else f"{field.encode_name} (optional)"


def kind_in_words(kind: Any) -> str:
    """A type as a user would say it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        spread = [part for part in parts if part in distributions()]
        plain = [part for part in parts if part not in (*spread, type(None))]
        return " or ".join([*map(kind_in_words, plain), *["a distribution"] * bool(spread)])
    if origin is tuple:
        return f"a list, each {kind_in_words(parts[0])}"
    if origin in (dict, Mapping) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "a table"
    return _KINDS.get(kind, str(kind))


def _default(field: Any) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else f'"{value}"' if isinstance(value, str) else str(value)


def _notes(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What stands beside each field in the source of a struct and its bases."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base in (msgspec.Struct, object) or not issubclass(base, msgspec.Struct):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines, body = source.splitlines(), ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)
        waiting: list[str] = []
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                waiting.append(node.target.id)
                behind = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].strip()
                if behind.startswith("#"):
                    found[node.target.id] = behind.lstrip("# ")
                    waiting.clear()
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and waiting:
                found[waiting[-1]] = " ".join(str(node.value.value).split())
                waiting.clear()
    return found
