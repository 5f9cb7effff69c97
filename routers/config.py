"""Options of policies: msgspec structs filled from a scenario, a command line or a test, and checked once.

A policy's `Options` is the only home of its defaults. Unknown names, wrong types and values that cannot work are
`OptionError`s that list what there is.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from routers.errors import OptionError

TIME_S_MAX = 1e9
"""No time that a user gives is longer: thirty years, whose microseconds a float still counts one by one."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all option sets; as it stands, the set of a policy without options.

    `refused`: options that the imitated router has and this one does not, each with the reason.
    """

    refused: ClassVar[Mapping[str, str]] = {}


OptionsT = TypeVar("OptionsT", bound=Options)


def make_options(kind: type[OptionsT], values: Mapping[str, Any], policy: str) -> OptionsT:
    """Values as TOML gives them. A number may be whole where a fraction is asked, nothing else is converted."""
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in values:
        if name in kind.refused:
            raise OptionError(f"policy {policy!r} has no option {name!r}: {kind.refused[name]}; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            choice = f"choose from {', '.join(known)}" if known else "this policy has no options; leave it out"
            raise OptionError(f"policy {policy!r} has no option {name!r}{hint}: {choice}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise OptionError(f"policy {policy!r}: {_plain(error)}") from error


def _plain(error: msgspec.ValidationError) -> str:
    """msgspec says `Expected X, got Y - at `$.name``; people read `name: Expected X, got Y`."""
    text, _, path = str(error).partition(" - at ")
    name = path.strip("`").removeprefix("$.")
    return f"option {name}: {text[0].lower()}{text[1:]}; give a value of that kind" if name not in ("", "$") else text


def parse_option(text: str) -> tuple[str, Any]:
    """`key=value` of a command line; the value is read as JSON (true, 0.5, "x") and else taken as it stands."""
    key, separator, raw = text.partition("=")
    if not separator or not key:
        raise OptionError(f"--option {text!r} has no value: write it as key=value")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        value = raw
    return key.strip().replace("-", "_"), value


def at_least(low: float, **values: float) -> None:
    """For `__post_init__`: each named value must be a finite number, not below `low`."""
    for name, value in values.items():
        if not math.isfinite(value) or value < low:
            raise OptionError(f"{name}={value} cannot work: give a finite number of at least {low:g}")


def at_most(high: float, **values: float) -> None:
    """For `__post_init__`: no named value may be above `high`."""
    for name, value in values.items():
        if value > high:
            raise OptionError(f"{name}={value} cannot work: give at most {high:.12g}")
