"""A request of a trace in our units, before it is text: what every loader turns its rows into.

Time is whole microseconds. What the prompt holds is said in one of three ways: block ids, text (already spans, see
`text_spans`), or a length alone, which makes it text of its own.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from workloads.errors import TraceError
from workloads.limits import TOKENS_MAX, shown
from workloads.spans import SPAN_ID_BITS, Span


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    path: str
    line: int
    """Where it stands, for messages."""
    session: str
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    """One id for each block of the prompt; equal ids are equal text within `scope`."""
    block_size: int = 0
    scope: str = ""
    """Ids mean the same in all rows of one scope; "" is the whole trace."""
    text: tuple[Span, ...] | None = None
    """The new input of this turn, when the trace holds text."""
    context: tuple[Span, ...] = ()
    """With text: what the first turn of a session begins with because another request said it."""
    only_new: bool = False
    """True: `input_tokens` and `hash_ids` are what this turn adds to the conversation, not the whole prompt."""
    restart: bool = False
    """True: the trace itself says that this prompt does not go on from the row before."""
    at_us: int | None = None
    """Arrival; any origin, the same for all rows."""
    pause_us: int | None = None
    """Between the end of what came before and this request."""
    name: str | None = None
    wait_for: tuple[str, ...] = ()
    """Names of rows that must have been answered."""
    answer: Span | None = None
    """The answer's span, when other rows quote it."""
    group: str | None = None
    cache_salt: str | None = None
    """The same in all rows of a session."""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def fault(self, what: str) -> TraceError:
        """An error that names the row."""
        return TraceError(self.where, what)


TIME_US_MAX = 10**17
"""3,000 years from any origin, which 64 bits hold as microseconds."""


def check_row(row: Row) -> None:
    """Refuses numbers out of all proportion, and ids that do not fit the length. Both roundings are found in the field:
    one id more for the partial block at the end, or full blocks only."""
    for tokens in (row.input_tokens, row.output_tokens):
        if tokens > TOKENS_MAX:
            raise row.fault(
                f"{shown(tokens)} tokens: no model takes more than {TOKENS_MAX:,}, so is this column the right one?"
            )
    for time_us in (row.at_us, row.pause_us):
        if time_us is not None and abs(time_us) > TIME_US_MAX:
            raise row.fault("a time of more than 3,000 years, or none at all: is the unit the right one?")
    if row.hash_ids is None:
        return
    if row.block_size < 1:
        raise row.fault(f"blocks of {row.block_size} tokens do not exist: set block_size to the trace's")
    full, ids = row.input_tokens // row.block_size, len(row.hash_ids)
    if ids not in (full, math.ceil(row.input_tokens / row.block_size)):
        per_block = row.input_tokens / max(ids, 1)
        raise row.fault(
            f"{row.input_tokens} input tokens are {row.input_tokens / row.block_size:.1f} blocks of {row.block_size}, "
            f"but {ids} hash ids stand there (about {per_block:.0f} tokens each): set block_size to the trace's"
        )


def us(value: float, unit_us: float) -> int:
    """A time of the trace in whole microseconds; what is no time, or too long for one, is just beyond the longest."""
    scaled = value * unit_us
    return round(scaled) if abs(scaled) <= TIME_US_MAX else TIME_US_MAX + 1


def digest(*parts: object) -> int:
    """63 bits that name text, the same on every machine."""
    data = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> (64 - SPAN_ID_BITS)


TEXT_BLOCK_TOKENS = 16


def text_spans(text: str, chars_per_token: float) -> tuple[Span, ...]:
    """Text as spans of at most 16 tokens, each named by its content, so that texts share leading spans as far as they
    agree. There is no tokenizer here: a token is `chars_per_token` characters, which is an estimate (4 is common for
    English), and both lengths and shared lengths inherit its error."""
    step = max(1, round(TEXT_BLOCK_TOKENS * chars_per_token))
    spans: list[Span] = []
    for start in range(0, len(text), step):
        piece = text[start : start + step]
        spans.append((digest("text", piece), min(TEXT_BLOCK_TOKENS, math.ceil(len(piece) / chars_per_token))))
    return tuple(spans)
