"""What is wrong with a key or a value of a table, in words that name the key and the mend.

Works on the messages of msgspec, which know the place and the kind but not what a user should write instead. Indices
of lists are told as they stand, and looked up as one place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from harness.errors import choose_from

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.+?)`(?: - at `\$(?P<path>.*)`)?$")
_WRONG = re.compile(r"(?P<before>.*?)Expected `(?P<wanted>.+?)`, got `(?P<found>.+?)`(?: - at `\$(?P<path>.*)`)?$")
_CHOICE = re.compile(r"Invalid enum value (?P<found>.+?)(?: - at `\$(?P<path>.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(?P<key>.+?)`(?: - at `\$(?P<path>.*)`)?$")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def explain(message: str, places: Mapping[str, type[msgspec.Struct]]) -> str:
    """`places` maps a path (as `.load`, or `.routers[...]` for any of a list) to what may stand there."""
    unknown, wrong = _UNKNOWN.match(message), _WRONG.match(message)
    if unknown:
        path = unknown["path"] or ""
        return f"unknown key {unknown['key']!r} in {path.strip('.') or 'the top level'}: " + _mend(
            unknown["key"], path, places
        )
    if wrong:
        where = f"{wrong['path'].strip('.')} is" if wrong["path"] else "it is"
        return f"{wrong['before']}{where} {_words(wrong['found'])} where {_words(wrong['wanted'])} is wanted"
    if choice := _CHOICE.match(message):
        found = choice["found"].strip("'")
        choices = _choices(choice["path"] or "", places)
        if choices:
            return f"{(choice['path'] or '').strip('.')} = {found!r}: {choose_from(found, choices)}"
    if missing := _MISSING.match(message):
        path = (missing["path"] or "").strip(".")
        choices = _choices(f"{path}.{missing['key']}", places)
        return f"{path or 'the top level'} has no {missing['key']!r}: " + (
            f"add {missing['key']} = one of {', '.join(choices)}" if choices else "add it"
        )
    return message.replace(" - at `$.", " (key ").replace("`", "") + (")" if " - at `$." in message else "")


def _mend(key: str, path: str, places: Mapping[str, type[msgspec.Struct]]) -> str:
    struct = places.get(_any_index(path))
    if struct is None:
        return "remove it"
    homes = [f"{place.strip('.')}.{key}" for place, kind in places.items() if key in kind.__struct_encode_fields__]
    homes = [home for home in homes if "[" not in home and home != f"{path.strip('.')}.{key}"]
    if homes:
        return f"it belongs elsewhere, write {' or '.join(homes)}"
    return choose_from(key, struct.__struct_encode_fields__)


def _choices(path: str, places: Mapping[str, type[msgspec.Struct]]) -> list[str]:
    """The words that may stand at a path; none where it is not known, or takes more than words."""
    place, _, key = _any_index(path).rpartition(".")
    struct = places.get(place)
    if struct is None or key not in struct.__struct_fields__:
        return []
    return sorted(word for word in _words_of(get_type_hints(struct)[key]) if isinstance(word, str))


def _words_of(kind: Any) -> Iterator[Any]:
    """Every value that a type lists."""
    for part in get_args(kind):
        if get_args(part):
            yield from _words_of(part)
        elif not isinstance(part, type):
            yield part


def _any_index(path: str) -> str:
    """A path as places are named: from its first dot, one place for all entries of a list."""
    return re.sub(r"\[\d+\]", "[...]", f".{path.lstrip('.')}" if path else "")


def _words(kinds: str) -> str:
    """`int | null` as a user would say it."""
    words = [_WORDS.get(kind.strip(), kind.strip()) for kind in kinds.split("|")]
    return " or ".join(words)
