"""Checks a JSON value against a declared shape and reports what is wrong the way a vLLM server does.

The real server validates with pydantic, and clients read its error list, so types, messages, places and their
order are reproduced here: every field in declaration order, every branch of a union, lenient conversions ("5" is
an integer, 5.5 is not). A union prefers a branch that fits without conversion. Nothing here knows of HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

Loc = tuple[str | int, ...]
Problem = dict[str, Any]  # type, loc, msg, input and, where there is one, ctx: in this order

REPORTED_MAX = 10  # problems spelled out in one message; the rest are counted
INPUT_CHARS_MAX = 200


class Kind:
    """One declared shape. `parse` returns the value and appends what is wrong to `problems`."""

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        raise NotImplementedError


def problem(kind: str, loc: Loc, message: str, value: Any, ctx: dict[str, Any] | None = None) -> Problem:
    found: Problem = {"type": kind, "loc": loc, "msg": message, "input": value}
    if ctx:
        found["ctx"] = ctx
    return found


@dataclass(frozen=True)
class AnyValue(Kind):
    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        return value


def _parse_number(text: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(text.strip())
    except ValueError:
        return None


@dataclass(frozen=True)
class Int(Kind):
    ge: int | None = None
    le: int | None = None

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        number = value
        if type(value) is not int:
            number = self._lenient(value, loc, problems, strict)
            if number is None:
                return value
        if self.ge is not None and number < self.ge:
            text = f"Input should be greater than or equal to {self.ge}"
            problems.append(problem("greater_than_equal", loc, text, value, {"ge": self.ge}))
        elif self.le is not None and number > self.le:
            text = f"Input should be less than or equal to {self.le}"
            problems.append(problem("less_than_equal", loc, text, value, {"le": self.le}))
        return number

    def _lenient(self, value: Any, loc: Loc, problems: list[Problem], strict: bool) -> int | None:
        if not strict and isinstance(value, bool):
            return int(value)
        if not strict and isinstance(value, float):
            if not math.isfinite(value):
                problems.append(problem("finite_number", loc, "Input should be a finite number", value))
                return None
            if value.is_integer():
                return int(value)
            text = "Input should be a valid integer, got a number with a fractional part"
            problems.append(problem("int_from_float", loc, text, value))
            return None
        if not strict and isinstance(value, str):
            number = _parse_number(value, int)
            if number is None:
                as_float = _parse_number(value, float)
                number = int(as_float) if as_float is not None and as_float.is_integer() else None
            if number is None:
                text = "Input should be a valid integer, unable to parse string as an integer"
                problems.append(problem("int_parsing", loc, text, value))
            return number
        problems.append(problem("int_type", loc, "Input should be a valid integer", value))
        return None


@dataclass(frozen=True)
class Float(Kind):
    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if type(value) is float:
            return value
        if isinstance(value, int) and (not strict or not isinstance(value, bool)):
            return float(value)
        if isinstance(value, str) and not strict:
            number = _parse_number(value, float)
            if number is None:
                text = "Input should be a valid number, unable to parse string as a number"
                problems.append(problem("float_parsing", loc, text, value))
            return number
        problems.append(problem("float_type", loc, "Input should be a valid number", value))
        return value


_TRUE = frozenset({"1", "t", "true", "y", "yes", "on"})
_FALSE = frozenset({"0", "f", "false", "n", "no", "off"})


@dataclass(frozen=True)
class Bool(Kind):
    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if isinstance(value, bool):
            return value
        if not strict and isinstance(value, (int, float, str)):
            if isinstance(value, str):
                if value.lower() in _TRUE or value.lower() in _FALSE:
                    return value.lower() in _TRUE
            elif value in (0, 1):
                return bool(value)
            elif isinstance(value, float):
                problems.append(problem("bool_type", loc, "Input should be a valid boolean", value))
                return value
            text = "Input should be a valid boolean, unable to interpret input"
            problems.append(problem("bool_parsing", loc, text, value))
            return value
        problems.append(problem("bool_type", loc, "Input should be a valid boolean", value))
        return value


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Str(Kind):
    min_length: int | None = None
    max_length: int | None = None

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if not isinstance(value, str):
            problems.append(problem("string_type", loc, "Input should be a valid string", value))
        elif self.min_length is not None and len(value) < self.min_length:
            text = f"String should have at least {_plural(self.min_length, 'character')}"
            problems.append(problem("string_too_short", loc, text, value, {"min_length": self.min_length}))
        elif self.max_length is not None and len(value) > self.max_length:
            text = f"String should have at most {_plural(self.max_length, 'character')}"
            problems.append(problem("string_too_long", loc, text, value, {"max_length": self.max_length}))
        return value


@dataclass(frozen=True)
class Literal(Kind):
    choices: tuple[str, ...]

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if not isinstance(value, str) or value not in self.choices:
            quoted = [repr(choice) for choice in self.choices]
            expected = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
            problems.append(problem("literal_error", loc, f"Input should be {expected}", value, {"expected": expected}))
        return value


_PLAIN_LISTS: dict[Kind, Any] = {
    Int(): list[Annotated[int, msgspec.Meta()]],
    Int(ge=0): list[Annotated[int, msgspec.Meta(ge=0)]],
    Str(): list[str],
}


@dataclass(frozen=True)
class List(Kind):
    """`iterable=True` words the complaint about a non-list as pydantic does for an Iterable."""

    item: Kind
    min_length: int | None = None
    max_length: int | None = None
    iterable: bool = False

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if not isinstance(value, list):
            if self.iterable:
                problems.append(problem("iterable_type", loc, "Input should be iterable", value))
            else:
                problems.append(problem("list_type", loc, "Input should be a valid list", value))
            return value
        if self._length_problem(value, loc, problems):
            return value
        plain = _PLAIN_LISTS.get(self.item)
        if plain is not None:
            try:  # thousands of token ids are checked in C; only a list with a fault is walked here
                return msgspec.convert(value, plain)
            except (msgspec.ValidationError, UnicodeEncodeError):  # the latter for a lone surrogate
                pass
        return [self.item.parse(entry, (*loc, at), problems, strict) for at, entry in enumerate(value)]

    def _length_problem(self, value: list[Any], loc: Loc, problems: list[Problem]) -> bool:
        limits = (("too_short", "at least", self.min_length), ("too_long", "at most", self.max_length))
        for kind, words, limit in limits:
            if limit is None or (len(value) >= limit if kind == "too_short" else len(value) <= limit):
                continue
            text = f"List should have {words} {_plural(limit, 'item')} after validation, not {len(value)}"
            key = "min_length" if kind == "too_short" else "max_length"
            ctx = {"field_type": "List", key: limit, "actual_length": len(value)}
            problems.append(problem(kind, loc, text, value, ctx))
            return True
        return False


@dataclass(frozen=True)
class Dict(Kind):
    value: Kind = field(default_factory=AnyValue)

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if not isinstance(value, dict):
            problems.append(problem("dict_type", loc, "Input should be a valid dictionary", value))
            return value
        return {key: self.value.parse(entry, (*loc, key), problems, strict) for key, entry in value.items()}


@dataclass(frozen=True)
class Optional(Kind):
    inner: Kind

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        return None if value is None else self.inner.parse(value, loc, problems, strict)


@dataclass(frozen=True)
class Union(Kind):
    """Tries every branch without conversion, then with; if none fits, the complaints of all branches follow each
    other. A tagged branch (`tags`) puts its name into the place of its complaints."""

    branches: tuple[Kind, ...]
    tags: tuple[str, ...] = ()

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        found: list[Problem] = []
        for exact in (True,) if strict else (True, False):
            found = []
            for at, branch in enumerate(self.branches):
                mine: list[Problem] = []
                place = (*loc, self.tags[at]) if self.tags else loc
                parsed = branch.parse(value, place, mine, exact)
                if not mine:
                    return parsed
                found.extend(mine)
        problems.extend(found)
        return value


@dataclass(frozen=True)
class Field:
    kind: Kind
    default: Any = None
    required: bool = False


@dataclass(frozen=True)
class Model(Kind):
    """An object with named fields; fields nobody declared are ignored, as the real server ignores them.

    `typed_dict=True` is for the shapes that the real server declares as dictionaries: absent keys stay absent.
    """

    fields: dict[str, Field]
    typed_dict: bool = False

    def parse(self, value: Any, loc: Loc, problems: list[Problem], strict: bool = False) -> Any:
        if not isinstance(value, dict):
            if self.typed_dict:
                problems.append(problem("dict_type", loc, "Input should be a valid dictionary", value))
            else:
                text = "Input should be a valid dictionary or object to extract fields from"
                problems.append(problem("model_attributes_type", loc, text, value))
            return value
        parsed: dict[str, Any] = {}
        for name, declared in self.fields.items():
            if name in value:
                parsed[name] = declared.kind.parse(value[name], (*loc, name), problems, strict)
            elif declared.required:
                problems.append(problem("missing", (*loc, name), "Field required", value))
            elif not self.typed_dict:
                parsed[name] = declared.default
        return parsed

    def __hash__(self) -> int:
        return id(self)


def place(loc: Loc) -> str:
    """The dotted form in which a place is named to the client: `body.prompt.1`."""
    return ".".join(str(part) for part in loc)


def report(problems: Sequence[Problem | str]) -> tuple[str, str | None]:
    """The message and the `param` of the error that tells a client about these problems."""
    noun = "error" if len(problems) == 1 else "errors"
    lines = [f"{len(problems)} validation {noun}:"]
    for found in problems[:REPORTED_MAX]:
        lines.append(f"  {found if isinstance(found, str) else _spell(found)}")
    if len(problems) > REPORTED_MAX:
        lines.append(f"  ...and {len(problems) - REPORTED_MAX} more {noun}")
    first = problems[0]
    return "\n".join(lines), None if isinstance(first, str) else place(first["loc"])


def _spell(found: Problem) -> str:
    shown = dict(found)
    shown["loc"] = place(found["loc"])
    shown["input"] = _summary(found["input"])
    return str(shown)


def _summary(value: Any) -> str:
    """A size-bounded stand-in for the offending value, so that an error never echoes a long prompt."""
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= INPUT_CHARS_MAX else f"{text[:INPUT_CHARS_MAX]}...[truncated]"
