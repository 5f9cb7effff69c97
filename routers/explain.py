"""What a policy is, for people: the words that stand at its class, its options with defaults and where those are from.

The docstring of an `Options` struct is the only home of that help. Its first paragraph says whose names and defaults
they are; then one line per option, as `- `name`: what it does [source, where it is another]`. A policy of a user's
own may say less; what it does not say is empty here, never made up.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from routers.config import Options
from routers.registry import find_policy, make_policy, policy_help

_ITEM = re.compile(r"^- ((?:`\w+`(?:, )?)+): (.*)$")
_SOURCE = re.compile(r"\s*\[([^\]]+)\]\.?$")
NOTES = {
    "text": "the text of the prompt",
    "tokens": "the prompt's token ids",
    "session_id": "the session's id",
    "kv_events": "the engines' KV cache events",
    "engine_metrics": "the engines' polled gauges",
    "reported_prefixes": "prefixes that engines report when asked",
    "oracle": "the truth, in a simulation only",
}


class OptionHelp(msgspec.Struct, frozen=True):
    name: str
    kind: str
    default: Any
    about: str
    source: str


class Explanation(msgspec.Struct, frozen=True):
    """`needs` maps a signal to what it means; `fails` says under which conditions the policy does badly;
    `refused` are options that the imitated router has and this one does not, each with the reason."""

    name: str
    about: str
    believes: str
    needs: Mapping[str, str]
    options: tuple[OptionHelp, ...]
    variants: Mapping[str, Mapping[str, Any]]
    source: str
    fails: str
    refused: Mapping[str, str]


def policy_explain(name: str) -> Explanation:
    """All that is known of a policy; `name` as `make_policy` takes it."""
    kind, variant = find_policy(name)
    options = getattr(kind, "Options", Options)
    help_by_name = option_help(options)
    found = []
    for field in msgspec.structs.fields(options):
        about, source = help_by_name.get(field.name, ("", ""))
        default = variant.get(field.name, None if field.required else field.default)
        found.append(OptionHelp(field.name, _kind(field.type), _plain(default), about, source))
    return Explanation(
        name=name,
        about=policy_help(name),
        believes=getattr(kind, "believes", ""),
        needs={signal.value: NOTES[signal.value] for signal in sorted(make_policy(name).needs)},
        options=tuple(found),
        variants=getattr(kind, "variants", {}),
        source=getattr(kind, "source", ""),
        fails=getattr(kind, "fails", ""),
        refused=getattr(options, "refused", {}),
    )


def option_help(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Option -> (what it does, whose default it has); what a base says holds unless the derived struct says anew."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        text = base.__dict__.get("__doc__") if issubclass(base, msgspec.Struct) else None
        if not isinstance(text, str) or base is Options:
            continue
        head, *items = _items(inspect.cleandoc(text))
        origin = head.rstrip(".:")
        for names, about in items:
            other = _SOURCE.search(about)
            source = other[1] if other is not None else origin
            for name in re.findall(r"`(\w+)`", names):
                found[name] = (about[: other.start()].rstrip() if other is not None else about, source)
    return found


def _items(text: str) -> list[Any]:
    """The first paragraph, then (names, text) of every item, lines joined."""
    found: list[Any] = [text.partition("\n\n")[0].replace("\n", " ")]
    names, lines = "", [""]
    for line in [*text.splitlines(), ""]:
        item = _ITEM.match(line)
        if names and (item is not None or not line.startswith("  ")):
            found.append((names, " ".join(part.strip() for part in lines)))
            names = ""
        if item is not None:
            names, lines = item[1], [item[2]]
        elif names:
            lines.append(line)
    return found


def _kind(value: Any) -> str:
    """A type as an option's reader would write it."""
    text = inspect.formatannotation(value)
    return re.sub(r"\b(?:typing|routers(?:\.\w+)*)\.", "", text).replace("NoneType", "None").replace("None", "unset")


def _plain(value: Any) -> Any:
    """Plain JSON values, structs without what is at its default."""
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        given = msgspec.structs.asdict(value)
        return {name: given[name] for name in given if given[name] != defaults[name]}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
