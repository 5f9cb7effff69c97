"""What is wrong with a key or a value of a table, in words that name the key and the mend.

Works on the messages of msgspec, which know the place and the kind but not what a user should write instead. Indices
of lists are told as they stand, and looked up as one place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from harness.errors import choose_from

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>.+?)`(?: - at `\$(?P<path>.*)`)?$")
_WRONG = re.compile(r"(?P<before>.*?)Expected `(?P<wanted>.+?)`, got `(?P<found>.+?)`(?: - at `\$(?P<path>.*)`)?$")
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
    return message.replace(" - at `$.", " (key ").replace("`", "") + (")" if " - at `$." in message else "")


def _mend(key: str, path: str, places: Mapping[str, type[msgspec.Struct]]) -> str:
    struct = places.get(re.sub(r"\[\d+\]", "[...]", path))
    if struct is None:
        return "remove it"
    homes = [f"{place.strip('.')}.{key}" for place, kind in places.items() if key in kind.__struct_encode_fields__]
    homes = [home for home in homes if "[" not in home and home != f"{path.strip('.')}.{key}"]
    if homes:
        return f"it belongs elsewhere, write {' or '.join(homes)}"
    return choose_from(key, struct.__struct_encode_fields__)


def _words(kinds: str) -> str:
    """`int | null` as a user would say it."""
    words = [_WORDS.get(kind.strip(), kind.strip()) for kind in kinds.split("|")]
    return " or ".join(words)
