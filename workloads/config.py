"""From a `[workload]` table to a workload, and back with every default filled in.

Law: every key is known, a default stands only in the field that holds it, and an error names the key and the mend.
The kinds are the entries of one visible dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from workloads.agentic import AgenticCoding
from workloads.bursts import GroupBurst, Waves
from workloads.distributions import DISTRIBUTION_KEYS
from workloads.errors import WorkloadConfigError, choose_from
from workloads.multi_turn import MultiTurn
from workloads.rag import Rag
from workloads.rollouts import RlRollout
from workloads.shared_prefix import SharedPrefix, UniformUnique
from workloads.table import WorkloadTable
from workloads.traces.workload import Trace

WORKLOADS: dict[str, type[WorkloadTable]] = {
    "agentic-coding": AgenticCoding,
    "group-burst": GroupBurst,
    "multi-turn": MultiTurn,
    "rag": Rag,
    "rl-rollout": RlRollout,
    "shared-prefix": SharedPrefix,
    "trace": Trace,
    "uniform-unique": UniformUnique,
    "waves": Waves,
}

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.+?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(?P<key>.+?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_WRONG = re.compile(r"Expected `(?P<wanted>.+?)`, got `(?P<found>.+?)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table with dist",
    "null": "nothing",
}
_OTHER = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


def make_workload(config: Mapping[str, Any]) -> WorkloadTable:
    """The workload of a table as TOML gives it. Raises WorkloadConfigError."""
    table = dict(config)
    kind = table.pop("kind", None)
    if kind is None:
        raise WorkloadConfigError(f"the workload has no kind: add kind = one of {', '.join(sorted(WORKLOADS))}")
    if not isinstance(kind, str) or kind not in WORKLOADS:
        raise WorkloadConfigError(f"no workload of kind {kind!r}: {choose_from(str(kind), WORKLOADS)}")
    struct = WORKLOADS[kind]
    try:
        table = struct.prepare(_unaliased(table, struct))
    except ValueError as error:
        raise WorkloadConfigError(str(error)) from error
    try:
        return msgspec.convert(table, struct)
    except msgspec.ValidationError as error:
        raise WorkloadConfigError(_explain(str(error), kind, table)) from error


def _unaliased(table: dict[str, Any], struct: type[WorkloadTable]) -> dict[str, Any]:
    """The table under our names. Raises ValueError when one number is given under two names."""
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        name = struct.aliases.get(key, key)
        if name in renamed or (name != key and name in table):
            raise ValueError(f"{key} is another name for {name}, and both are given: keep {name}")
        renamed[name] = value
    return renamed


def resolved(workload: WorkloadTable) -> dict[str, Any]:
    """The table of a workload with every default; `make_workload` of it gives an equal workload."""
    table: dict[str, Any] = {"kind": workload.kind}
    for key, value in msgspec.to_builtins(workload).items():
        if isinstance(value, dict):
            bounds = {k: value.pop(k) for k in ("min", "max")}
            value = {k: list(v) if isinstance(v, tuple) else v for k, v in (value | bounds).items() if v is not None}
        table[key] = value
    return table


def workload_keys(kind: str) -> tuple[str, ...]:
    """Keys that a table of this kind may have."""
    return ("kind", *(field.encode_name for field in msgspec.structs.fields(WORKLOADS[kind])))


def _explain(message: str, kind: str, table: Mapping[str, Any]) -> str:
    """msgspec's message as one that names the key, what stands there and the mend."""
    if unknown := _UNKNOWN.match(message):
        path = unknown["path"]
        if path:
            dist = table[path].get("dist")
            keys = ("dist", *DISTRIBUTION_KEYS.get(dist, ()))
            return f"unknown key {unknown['key']!r} in {path}: {choose_from(unknown['key'], keys)}"
        key = unknown["key"]
        return f"unknown key {key!r} in workload {kind!r}: {choose_from(key, workload_keys(kind))}"
    if missing := _MISSING.match(message):
        path = missing["path"]
        if path and missing["key"] == "dist":
            return f"{path} is a table without dist: add dist = one of {', '.join(DISTRIBUTION_KEYS)}"
        return f"{path or f'the workload of kind {kind!r}'} has no {missing['key']!r}: add it"
    other = _OTHER.match(message)
    path = (other["path"] if other else None) or ""
    what = other["what"] if other else message
    key = path.removesuffix(".dist")
    if path.endswith(".dist"):
        found = table[key].get("dist")
        return f"{key} has dist = {found!r}: {choose_from(str(found), DISTRIBUTION_KEYS)}"
    if not path:
        return what
    found = _found(table, key)
    if what.startswith("Invalid enum value"):
        return f"{key} = {found!r}: {choose_from(str(found), get_args(get_type_hints(WORKLOADS[kind])[key]))}"
    if wrong := _WRONG.match(what):
        return f"{key} = {found!r} is {_in_words(wrong['found'])} where {_in_words(wrong['wanted'])} is wanted"
    return f"{key} = {found!r} does not fit: {what.replace('`', '')}"


def _found(table: Mapping[str, Any], path: str) -> Any:
    """What stands at a path."""
    value: Any = table
    for key, index in _STEP.findall(path):
        value = value[int(index)] if index else value[key]
    return value


def _in_words(kinds: str) -> str:
    """`int | object`, as the library says it, in words of a user."""
    return " or ".join(_KINDS.get(kind.strip(), kind.strip()) for kind in kinds.split("|"))
