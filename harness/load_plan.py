"""What a load generator process must know, and how a turn becomes a request body and its answer a history.

Pure: no Locust, no socket. A plan is one JSON file, so that any number of processes read the same. The history of a
conversation carries the answers as the API under test needs them: with token ids the answer is known beforehand
(the request's seed names it) and is checked; with text or chat it is whatever came back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from harness.chat_form import messages, said
from harness.drive import TIME_S_MAX, Drive
from harness.errors import UsageError, choose_from
from harness.spread import Spread, ingress_of
from harness.sse import TokenMeter
from workloads import (
    FIRST_TOKEN_ID,
    TOKEN_RANGE,
    Session,
    Span,
    Turn,
    WorkloadsError,
    make_workload,
    span_text,
    token_ids,
)

Api = Literal["completions-ids", "completions-text", "chat"]
PATHS: dict[str, str] = {
    "completions-ids": "/v1/completions",
    "completions-text": "/v1/completions",
    "chat": "/v1/chat/completions",
}
Ids = npt.NDArray[np.signedinteger[Any]]


class LoadPlan(Drive, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm's load, complete: the driver's keys and these."""

    workload: dict[str, Any]
    """A `[workload]` table."""
    seed: int
    rows_dir: str
    """Folder for `locust-<pid>.jsonl` and `locust-<pid>.events.jsonl`."""
    epoch_ns: int
    """`time.monotonic_ns()` at the instant that rows call 0."""
    api: Api = "completions-ids"
    model: str = "mock-model"
    session_header: str = "X-Session-ID"
    request_timeout_s: float = 300.0
    replicas: dict[str, str] = msgspec.field(default_factory=dict)
    """Names and addresses of the engines behind the router, where they are known."""
    ingresses: dict[str, str] = msgspec.field(default_factory=dict)
    """Names and addresses of the routers that requests go round; none: all go to Locust's host."""
    spread: Spread = "turn"
    answers: Literal["known", "live"] = "known"
    """Ids API only. known: the engine generates what the seed stands for. live: history takes the ids that came."""
    verify_answers: Literal["first", "all", "none"] = "first"
    """Which turns of a session ask for their token ids and compare them, when answers are known."""
    arm: str | None = None
    """A name for messages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epoch_ns < 0:
            raise ValueError(f"epoch_ns = {self.epoch_ns}: give at least 0")
        if not 0 < self.request_timeout_s <= TIME_S_MAX:
            raise ValueError(f"request_timeout_s = {self.request_timeout_s}: from above 0 to {TIME_S_MAX:g} s")
        header = self.session_header
        if not header.isascii() or not header.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"session_header = {header!r}: give a header name such as 'X-Session-ID'")

    def ingress(self, session: int, turn: int) -> str | None:
        """The name of the ingress that a turn goes to; `session` is its number in the workload. None: Locust's host."""
        names = list(self.ingresses)
        return names[ingress_of(self.spread, session, turn, len(names))] if names else None


def read_plan(path: str | Path) -> LoadPlan:
    """The plan in a file, checked with its workload. Raises UsageError."""
    try:
        plan = msgspec.json.decode(Path(path).read_bytes(), type=LoadPlan)
        make_workload(plan.workload)
    except OSError as error:
        raise UsageError(f"cannot read the load plan {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"the load plan {path} cannot be used: {error}; its keys are {', '.join(LoadPlan.__struct_fields__)}"
        ) from error
    except WorkloadsError as error:
        raise UsageError(f"the load plan {path}: workload: {error}") from error
    return plan


def check_api(name: str) -> Api:
    """The name as a known API. Raises UsageError."""
    if name not in PATHS:
        raise UsageError(f"no api named {name!r}: {choose_from(name, PATHS)}")
    return name  # type: ignore[return-value]


class AnswerError(Exception):
    """The engine did not generate what the request's seed stands for; the history would be fiction from here on."""


class Conversation:
    """One session on its way: builds each turn's body from what was said and answered before."""

    __slots__ = ("_front", "_history", "_plan", "session")

    def __init__(self, plan: LoadPlan, session: Session) -> None:
        self._plan = plan
        self.session = session
        self._history: list[tuple[str, Span | Ids | str]] = []
        """(role, text); a span stands for its tokens."""
        self._front: Span | None = None
        """What the present request alone has in front of the history."""

    def meter(self, turn: Turn) -> TokenMeter:
        """A meter that keeps of this turn's answer what the history or a check will need."""
        by_ids = self._plan.api == "completions-ids"
        return TokenMeter(keep_ids=by_ids and self._wants_ids(turn), keep_text=not by_ids)

    def body(self, turn: Turn) -> bytes:
        """The request of a turn, whose input from now on is part of the history."""
        self._front = turn.front
        if turn.restart:  # what was said before is dropped: the input is the whole prompt
            self._history.clear()
        self._history += said(turn)
        fields: dict[str, Any] = {
            "model": self._plan.model,
            "max_tokens": turn.output[1],
            "ignore_eos": True,
            "seed": turn.output[0],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.session.cache_salt is not None:
            fields["cache_salt"] = self.session.cache_salt
        if self._plan.api == "chat":
            fields["messages"] = self._messages()
        elif self._plan.api == "completions-text":
            fields["prompt"] = "".join(_text(part) for part in self._parts())
        elif self._wants_ids(turn):
            fields["return_token_ids"] = True
        encoded = msgspec.json.encode(fields)
        if self._plan.api == "completions-ids":
            return b'{"prompt":%b,%b' % (ids_json(self._prompt_ids()), encoded[1:])
        return encoded

    def prompt_tokens(self) -> int | None:
        """Length of the prompt just built, when it is known without a tokenizer."""
        if self._plan.api != "completions-ids":
            return None
        return sum(part[1] if isinstance(part, tuple) else len(part) for part in self._parts())

    def answered(self, turn: Turn, meter: TokenMeter) -> bool | None:
        """Takes a successful answer into the history. True: checked and right; None: not checked.

        Raises AnswerError.
        """
        if self._plan.api != "completions-ids":
            self._history.append(("assistant", meter.text))
            return None
        if self._plan.answers == "live":
            live = np.array(meter.token_ids or (), dtype=np.int32)
            self._history.append(("assistant", live if len(live) else turn.output))
            return None
        self._history.append(("assistant", turn.output))
        return self._check(turn, meter)

    def _check(self, turn: Turn, meter: TokenMeter) -> bool | None:
        span_id, tokens = turn.output
        if meter.token_source != "chunks" and meter.output_tokens != tokens:
            raise AnswerError(
                f"{meter.output_tokens} tokens came and {tokens} were asked for with ignore_eos: look at "
                'the engine\'s max_model_len, or use answers = "live" for engines that are not ours'
            )
        if not self._wants_ids(turn):
            return None
        if meter.token_ids is None:
            raise AnswerError(
                "no token_ids came although return_token_ids was sent: the engine or the router drops "
                'the field; use verify_answers = "none" or api = "completions-text"'
            )
        expected = token_ids(span_id, 0, tokens).tolist()
        if meter.token_ids != expected:
            at = next((k for k, (a, b) in enumerate(zip(meter.token_ids, expected, strict=False)) if a != b), tokens)
            raise AnswerError(
                f"token {at} of the answer is not the one that seed {span_id} stands for: the engine is "
                'not one of ours (use answers = "live"), or an answer reached the wrong request'
            )
        return True

    def _wants_ids(self, turn: Turn) -> bool:
        if self._plan.answers == "live":
            return True
        return self._plan.verify_answers == "all" or (self._plan.verify_answers == "first" and turn.index == 0)

    def _prompt_ids(self) -> Ids:
        parts: list[Ids] = [
            token_ids(p[0], 0, p[1]) if isinstance(p, tuple) else p for p in self._parts() if not isinstance(p, str)
        ]
        return np.concatenate(parts)

    def _parts(self) -> list[Span | Ids | str]:
        """The prompt's parts in order."""
        return [*([self._front] if self._front else []), *(part for _, part in self._history)]

    def _messages(self) -> list[dict[str, str]]:
        return [
            {"role": role, "content": "".join(_text(part) for part in parts)}
            for role, parts in messages(self._history, self._front)
        ]


def _text(part: Span | Ids | str) -> str:
    if isinstance(part, str):
        return part
    return span_text(part[0], 0, part[1]) if isinstance(part, tuple) else ""


_CELLS = np.frombuffer(b"".join(b"%5d," % n for n in range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + TOKEN_RANGE)), dtype="V6")
"""Every id of our vocabulary as six bytes of JSON with its comma; JSON allows the space. Made at import, because the
milliseconds it takes would make the first request late."""


def ids_json(ids: Ids) -> bytes:
    """A JSON array of token ids. Ours go through a table of ready bytes, about 20 times faster than printing them,
    so that a long prompt does not hold up the other streams of this process."""
    if not len(ids):
        return b"[]"
    if ids.min() < FIRST_TOKEN_ID or ids.max() >= FIRST_TOKEN_ID + TOKEN_RANGE:
        return msgspec.json.encode(ids.tolist())
    return b"[%b]" % _CELLS.take(ids - FIRST_TOKEN_ID).tobytes()[:-1]
