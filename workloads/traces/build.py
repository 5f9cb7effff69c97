"""Rows of one session become turns: block ids become spans, and what a prompt repeats becomes history.

A block id is a span of one block. A later row goes on from the row before when it is long enough to hold that prompt
and its answer and repeats all of that prompt's full blocks; then the turn's new input is what remains, and the answer
in the history is the live one. That the answer is there cannot be seen in ids, which cover prompts only; length is
all a trace says about it. Any other row restarts the history with its own prompt (`Turn.restart`): its leading blocks
are still those of earlier prompts where the ids are, only the answer is not reused, as when thoughts are dropped.

The block in which an answer lies has an id of its own in the trace. What it is made of is remembered (for a bounded
number of such ids), so that another session that forks off behind it shares it as the trace says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from workloads.sessions import Session, Turn
from workloads.spans import SPAN_ID_BITS, Span
from workloads.splitmix import MASK, mix, mix_one
from workloads.traces.rows import Row, check_row, digest

REMEMBERED_BLOCKS_MAX = 100_000
"""Blocks around answers that are kept for forks; about 45 MB when full. The oldest is forgotten first."""
FEW_BLOCKS = 8
"""So many ids are named one by one, which is faster than any array."""
_TAIL, _ANSWER, _LOOSE, _TEXT = 0x7461696C, 0x616E7377, 0x6C6F6F73, 0x74657874
"""Kinds of spans that are named by something else than a whole block's id."""

Slice = tuple[int, int, int]
"""(span id, first token, end)"""


@dataclass(frozen=True, slots=True)
class Timing:
    """How instants and pauses of a trace become those of a load."""

    origin_us: int = 0
    speedup: float = 1.0
    idle_gap_cap_us: int | None = None
    """Of the trace's own time, before `speedup`."""
    use_instants: bool = True
    """False: recorded arrivals are dropped and slots take the sessions."""

    def pause(self, pause_us: int) -> int:
        return round(self.gap(pause_us) / self.speedup)

    def gap(self, gap_us: int) -> int:
        return max(0, gap_us if self.idle_gap_cap_us is None else min(gap_us, self.idle_gap_cap_us))

    def instant(self, at_us: int) -> int:
        return max(0, round((at_us - self.origin_us) / self.speedup))


class _Context:
    """A conversation so far, with the place of every span."""

    __slots__ = ("spans", "starts", "tokens")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.starts: list[int] = []
        self.tokens = 0

    def extend(self, spans: tuple[Span, ...]) -> None:
        for span in spans:
            self.spans.append(span)
            self.starts.append(self.tokens)
            self.tokens += span[1]

    def slices(self, first: int, end: int) -> tuple[Slice, ...]:
        """What lies between two places."""
        found: list[Slice] = []
        i = bisect_right(self.starts, first) - 1
        while i < len(self.spans) and self.starts[i] < end:
            span_id, tokens = self.spans[i]
            start = self.starts[i]
            low, high = max(first, start), min(end, start + tokens)
            if low < high:
                found.append((span_id, low - start, high - start))
            i += 1
        return tuple(found)


class Builder:
    """Makes sessions of rows. One builder reads one trace; `salt` names the text of a run."""

    def __init__(self, salt: int, timing: Timing) -> None:
        self._salt = salt
        self._timing = timing
        self._made_of: OrderedDict[int, tuple[Slice, ...]] = OrderedDict()
        self._scopes: dict[str, int] = {}

    def session(self, rows: list[Row]) -> Session:
        """The session of the rows of one conversation, in their order."""
        turns: list[Turn] = []
        context = _Context()
        due = self._instants(rows)
        for i, row in enumerate(rows):
            check_row(row)
            goes_on = i > 0 and self._goes_on(rows[i - 1], row)
            if not goes_on:
                context = _Context()
            new = self._more(rows[i - 1], row, context) if goes_on else self._whole(row, i)
            context.extend(new)
            answer = (self._answer_id(rows, i), row.output_tokens)
            if goes_on:
                self._remember(rows[i - 1], row, context)
            context.extend((answer,))
            turns.append(self._turn(rows, i, due[i], new, answer, restart=i > 0 and not goes_on))
        first = rows[0]
        timed = self._timing.use_instants and first.at_us is not None and not first.wait_for
        return Session(
            session_id=first.session,
            turns=tuple(turns),
            group=first.group,
            start_us=due[0] if timed else None,
            after=first.wait_for,
            cache_salt=first.cache_salt,
        )

    # ---- time -------------------------------------------------------------------------------------------------

    def _turn(
        self, rows: list[Row], i: int, due_us: int | None, new: tuple[Span, ...], answer: Span, *, restart: bool
    ) -> Turn:
        row, timing = rows[i], self._timing
        pause_us = row.pause_us
        start_us: int | None = None
        if i and pause_us is None and row.at_us is not None:
            if timing.use_instants:
                start_us = due_us
            else:
                before = rows[i - 1].at_us
                pause_us = row.at_us - before if before is not None else 0
        return Turn(
            i,
            new,
            answer,
            timing.pause(pause_us or 0),
            restart=restart,
            start_us=start_us,
            after=row.wait_for if i else (),
            name=row.name,
        )

    def _instants(self, rows: list[Row]) -> list[int | None]:
        """When each row is due; gaps above the cap are shortened for the row and all that follow."""
        found: list[int | None] = []
        at_us: int | None = None
        before: int | None = None
        for row in rows:
            if row.at_us is None:
                found.append(None)
                continue
            at_us = row.at_us if at_us is None or before is None else at_us + self._timing.gap(row.at_us - before)
            before = row.at_us
            found.append(self._timing.instant(at_us))
        return found

    # ---- text -------------------------------------------------------------------------------------------------

    @staticmethod
    def _goes_on(before: Row, row: Row) -> bool:
        if row.restart:
            return False
        if row.text is not None or row.only_new:
            return True
        if row.input_tokens < before.input_tokens + before.output_tokens:
            return False
        if row.hash_ids is None or before.hash_ids is None:
            return row.hash_ids is before.hash_ids
        if (row.block_size, row.scope) != (before.block_size, before.scope):
            return False
        full = before.input_tokens // before.block_size
        return row.hash_ids[:full] == before.hash_ids[:full]

    def _whole(self, row: Row, i: int) -> tuple[Span, ...]:
        """A prompt that begins anew."""
        if row.text is not None:
            return self._salted((*row.context, *row.text)) or ((self._loose(row, i), 1),)
        if row.hash_ids is None:
            return ((self._loose(row, i), row.input_tokens),)
        return self._blocks(row, i)

    def _more(self, before: Row, row: Row, context: _Context) -> tuple[Span, ...]:
        """What a row adds to the conversation."""
        if row.text is not None:
            return self._salted(row.text)
        number = len(context.spans)
        if row.only_new:
            return self._whole(row, number) if row.input_tokens else ()
        place, end = context.tokens, row.input_tokens
        if row.hash_ids is None:
            return ((self._loose(row, number), end - place),) if end > place else ()
        new: list[Span] = []
        names = self._block_ids(row, place // row.block_size)
        for name in names:
            if place >= end:
                break
            stop = min((place // row.block_size + 1) * row.block_size, end)
            whole = place % row.block_size == 0
            new.append((name if whole else self._derived(_TAIL, name), stop - place))
            place = stop
        if place < end:  # the partial block has no id
            new.append((self._loose(row, number), end - place))
        return tuple(new)

    def _blocks(self, row: Row, i: int) -> tuple[Span, ...]:
        """A prompt as its ids say."""
        assert row.hash_ids is not None
        block, left = row.block_size, row.input_tokens
        spans: list[Span] = []
        for name in self._block_ids(row, 0):
            want = min(block, left)
            made_of = self._made_of.get(name)
            if made_of is None or not _joins(spans, made_of[0]):
                spans.append((name, want))
            else:
                done = 0
                for span_id, first, end in made_of:
                    tokens = min(end - first, want - done)
                    if tokens <= 0:
                        break
                    if first:
                        spans[-1] = (span_id, first + tokens)
                    else:
                        spans.append((span_id, tokens))
                    done += tokens
            left -= want
        if left:
            spans.append((self._loose(row, i), left))
        return tuple(spans)

    def _remember(self, before: Row, row: Row, context: _Context) -> None:
        """Notes what the blocks around the answer before this prompt are made of. `context` ends with the prompt."""
        if row.hash_ids is None or row.only_new or row.text is not None:
            return
        block = row.block_size
        first = before.input_tokens // block
        last = (before.input_tokens + before.output_tokens) // block
        for number, name in enumerate(self._block_ids(row, first, last + 1), first):
            if (number + 1) * block > row.input_tokens:
                break
            self._made_of[name] = context.slices(number * block, (number + 1) * block)
            self._made_of.move_to_end(name)
            if len(self._made_of) > REMEMBERED_BLOCKS_MAX:
                self._made_of.popitem(last=False)

    def _block_ids(self, row: Row, first: int, end: int | None = None) -> list[int]:
        """Span ids of a row's blocks."""
        ids = (row.hash_ids or ())[first:end]
        if len(ids) <= FEW_BLOCKS:
            salt = self._scope(row.scope) if ids else 0
            return [mix_one(number ^ salt) >> (64 - SPAN_ID_BITS) for number in ids]
        try:
            numbers = np.array(ids, dtype=np.uint64)
        except OverflowError:
            numbers = np.array([number & MASK for number in ids], dtype=np.uint64)
        named: list[int] = (mix(numbers ^ np.uint64(self._scope(row.scope))) >> np.uint64(64 - SPAN_ID_BITS)).tolist()
        return named

    def _scope(self, scope: str) -> int:
        """Salt of the ids of one scope; the last few are kept, as scopes come one after the other."""
        salt = self._scopes.get(scope)
        if salt is None:
            if len(self._scopes) > 64:
                self._scopes.clear()
            if scope:
                self._made_of.clear()  # ids of a scope of its own are not met again
            salt = self._scopes[scope] = mix_one(self._salt ^ digest(scope))
        return salt

    def _answer_id(self, rows: list[Row], i: int) -> int:
        """Sessions whose next prompts are equal had equal answers, so the id of the next prompt's block names it."""
        row, following = rows[i], rows[i + 1] if i + 1 < len(rows) else None
        if row.answer is not None:
            return self._salted((row.answer,))[0][0]
        of_its_own = self._derived(_ANSWER, digest(row.session, i))
        if row.hash_ids is None or following is None or following.only_new or not self._goes_on(row, following):
            return of_its_own
        block = row.input_tokens // row.block_size
        names = self._block_ids(following, block, block + 1)
        return self._derived(_ANSWER, names[0]) if names else of_its_own

    def _loose(self, row: Row, i: int) -> int:
        """Text that no id names: the session's own."""
        return self._derived(_LOOSE, digest(row.session, i))

    def _salted(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Text of the trace as text of this run."""
        return tuple((self._derived(_TEXT, span_id), tokens) for span_id, tokens in spans)

    def _derived(self, kind: int, value: int) -> int:
        return mix_one(mix_one(self._salt ^ kind) ^ value) >> (64 - SPAN_ID_BITS)


def _joins(spans: list[Span], piece: Slice) -> bool:
    """True: the piece begins a span, or goes on exactly where the last one ends."""
    span_id, first, _ = piece
    return first == 0 or (bool(spans) and spans[-1] == (span_id, first))
