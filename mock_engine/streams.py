"""One answer on its way to a client: tokens become text, text becomes chunks or one body.

A `Choice` is one engine request, a `Reply` the HTTP answer that holds one or more of them. The driver calls them at
the instant a token becomes visible; nothing here waits, and bytes leave through a function that is handed in. The
odd thing is a client that reads slowly: its tokens are held and merged into fewer chunks, as in vLLM, so it can
neither stall the others nor fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mock_engine.bodies import DONE, Bodies, Piece, encode_json, prompt_details, usage
from mock_engine.logprobs import Logprobs
from mock_engine.protocol import Sampling
from mock_engine.request import Request, TokenSequence
from mock_engine.tokenizer import Decoder, Tokenizer

UNSENT_BYTES_MAX = 64 * 1024  # with more than this unsent, a stream's tokens are held back and merged
IDS_AHEAD = 64  # output ids are fetched this many at a time


class StopScanner:
    """Finds stop strings in growing text and says how much of it may be shown already."""

    def __init__(self, sampling: Sampling) -> None:
        self._stops = sampling.stop
        self._include = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._hold = 0 if sampling.include_stop else max(map(len, sampling.stop)) - 1
        self._window = max(map(len, sampling.stop)) - 1
        self.text = ""
        self._scanned = 0
        self._shown = 0

    def push(self, piece: str, tokens: int) -> str | None:
        """Adds the text of token number `tokens`; the stop string that is complete now, or None."""
        self.text += piece
        start = max(0, self._scanned - self._window)
        if tokens <= self._min_tokens:
            self._scanned = len(self.text) + self._window
            return None
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        self._scanned = max(self._scanned, len(self.text))
        if not found:
            return None
        at, stop = min(found, key=lambda hit: hit[0])
        self.text = self.text[: at + len(stop) if self._include else at]
        return stop

    def take(self, final: bool = False) -> str:
        """Text that may be shown and has not been."""
        end = len(self.text) if final else max(self._shown, len(self.text) - self._hold)
        piece, self._shown = self.text[self._shown : end], end
        return piece


class Prompt:
    """One prompt of a request and what its samples have in common."""

    __slots__ = ("cached_tokens", "ids", "longest", "n", "open", "text")

    def __init__(self, ids: list[int], text: str | None, n: int) -> None:
        self.ids = ids
        self.text = text
        self.n = n
        self.open = n  # samples that have not ended
        self.longest = 0
        self.cached_tokens: int | None = None


class Reply:
    """An HTTP answer. `write` takes whole events of a stream, held until the stream is open; without one the answer is
    collected for `body`."""

    def __init__(
        self,
        bodies: Bodies,
        prompts: Sequence[Prompt],
        *,
        stream: bool = False,
        echo: bool = False,
        return_token_ids: bool = False,
        include_usage: bool = False,
        continuous_usage: bool = False,
        show_details: bool = False,
        created_blocks_of: int | None = None,
        stream_interval: int = 1,
        prompt_text: str | None = None,
        echo_only: bool = False,
        logprobs: Logprobs | None = None,
        client_id: str = "",
        first_chunk_tokens: int = 1,
        reasoning_tokens: int = 0,
    ) -> None:
        self.bodies = bodies
        self.client_id = client_id or bodies.response_id  # the id that the client sent, for logs
        self.error: dict[str, Any] | None = None  # what ended the answer instead of its last token
        self.prompts = prompts
        self.echo = echo
        self.echo_only = echo_only
        self.return_token_ids = return_token_ids
        self.include_usage = include_usage
        self.continuous_usage = continuous_usage and include_usage
        self.show_details = show_details
        self.created_blocks_of = created_blocks_of  # block size if newly cached tokens are told too
        self.stream_interval = stream_interval
        self.first_chunk_tokens = first_chunk_tokens  # held back until there are so many
        self.reasoning_tokens = reasoning_tokens  # of each choice, before its content
        self.prompt_text = prompt_text
        self.logprobs = logprobs
        self.choices: list[Choice] = []
        self.open = 0
        self._early: list[bytes] = []
        self.write: Callable[[bytes], None] | None = self._early.append if stream else None
        self.unsent: Callable[[], int] = int
        self.on_end: Callable[[], None] = _nothing
        self.metrics: dict[str, Any] | None = None

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)
        self.open += 1

    def open_stream(self, write: Callable[[bytes], None], unsent: Callable[[], int]) -> None:
        """The headers are out: events go to `write` from now on, while `unsent` bytes wait for the client."""
        for data in self._early:
            write(data)
        self.write, self.unsent = write, unsent

    def choice_ended(self) -> None:
        self.open -= 1
        if self.open:
            return
        if self.write is not None:
            if self.include_usage:
                self.write(self.bodies.usage_chunk(self._usage(streamed=True)))
            self.write(DONE)
        self.on_end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the answer with an error; in a stream it comes as an event after the headers."""
        if self.error is not None:
            return
        self.open, self.error = 0, body
        if self.write is not None:
            self.write(self.bodies.error_event(body))
            self.write(DONE)
        self.on_end()

    def detach(self) -> None:
        """The client is gone: write nothing any more."""
        self.write = None
        self.on_end = _nothing

    def _usage(self, streamed: bool) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        details = None
        if self.show_details:
            told = self.prompts[0] if streamed else self.prompts[-1]
            cached = told.cached_tokens or 0
            created = None
            if self.created_blocks_of is not None:
                created = len(told.ids) // self.created_blocks_of * self.created_blocks_of - cached
            details = prompt_details(cached, created)
        return usage(prompt_tokens, sum(choice.count for choice in self.choices), details, streamed=streamed)

    def body(self) -> bytes:
        """The whole answer, once every choice has ended."""
        chat_ids = self.prompts[0].ids if self.return_token_ids else None
        rows = [choice.row() for choice in self.choices]
        return self.bodies.whole(
            rows,
            self._usage(streamed=False),
            metrics=self.metrics,
            prompt_ids=chat_ids,
            prompt_text=self.prompt_text,
        )


class Choice:
    """One sample of one prompt: an engine request with its text. Instants are microseconds of the model's clock."""

    __slots__ = (
        "_after", "_before", "_decoder", "_ids", "_ids_start", "_new_ids", "_plain", "_sequence", "_since",
        "_started", "_stops", "_text", "_text_offset", "_tokenizer", "admitted_us", "arrived_us",
        "cached_tokens", "count", "eos_token_id", "finish_reason", "first_us", "index", "last_us",
        "preemptions", "prompt", "reply", "request", "sampling", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        reply: Reply,
        prompt: Prompt,
        request: Request,
        sequence: TokenSequence,
        sampling: Sampling,
        tokenizer: Tokenizer,
        arrived_us: int = 0,
    ) -> None:
        self.reply = reply
        self.prompt = prompt
        self.request = request
        self.sampling = sampling
        self.index = len(reply.choices)
        self.eos_token_id = tokenizer.eos_token_id
        self.arrived_us = arrived_us
        self.admitted_us: int | None = None
        self.first_us: int | None = None
        self.last_us: int | None = None
        self.cached_tokens = 0  # of the prompt, at first admission
        self.count = 0  # tokens so far
        self.preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # output ids from position _ids_start on
        self._ids_start = 0
        self._decoder: Decoder = tokenizer.decoder(sampling.skip_special_tokens)
        self._stops = StopScanner(sampling) if sampling.stop else None
        self._text = ""  # decoded and not sent yet
        self._text_offset = 0  # characters of text before the next log-probability
        self._new_ids: list[int] = []  # ids not sent yet
        self._since = 0  # tokens since the last chunk
        self._started = False  # the first chunk is out
        self._plain = False  # chunks differ in their text only
        self._before = self._after = b""
        reply.add(self)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def streaming(self) -> bool:
        return self.reply.write is not None

    def token(self, final: str | None) -> bool:
        """The next token is visible now; `final` is the engine's finish reason if it is the last one. True if the text
        ended the answer by itself, so that the engine has to be told."""
        self.count = count = self.count + 1
        reply = self.reply
        if self._plain and final is None and count > reply.reasoning_tokens:
            write = reply.write
            if write is not None and reply.unsent() <= UNSENT_BYTES_MAX and not self._text:
                text = self._decoder.push(self._next_id(count - 1))
                write(self._before + encode_json(text) + self._after)
                return False
        return self._careful_token(final)

    def _next_id(self, position: int) -> int:
        at = position - self._ids_start
        if at >= len(self._ids):
            self._ids_start = position
            self._ids = self._sequence.output_token_ids(position, position + IDS_AHEAD)
            at = 0
        return self._ids[at]

    def _careful_token(self, final: str | None) -> bool:
        reply = self.reply
        if reply.write is None and self._stops is None:
            if final is not None:
                self._end_by_token(final)
            return False
        token_id = self._next_id(self.count - 1)
        self._new_ids.append(token_id)
        self._since += 1
        hidden = final == "stop" and not self.sampling.include_stop
        piece = "" if hidden else self._decoder.push(token_id)
        stopped = None
        if self._stops is None:
            self._text += piece
        else:
            stopped = self._stops.push(piece, self.count)
            self._text += self._stops.take(final is not None or stopped is not None)
        if stopped is not None:
            self.finish_reason, self.stop_reason = "stop", stopped
            self._finish()
            return final is None
        if final is not None:
            self._end_by_token(final)
        elif reply.write is not None and self._due():
            self._send(None)
        return False

    def _due(self) -> bool:
        if not self._started:
            return self._since >= self.reply.first_chunk_tokens
        if self.count == self.reply.reasoning_tokens:
            return True  # no chunk holds both
        return self._since >= self.reply.stream_interval and self.reply.unsent() <= UNSENT_BYTES_MAX

    def _end_by_token(self, reason: str) -> None:
        self.finish_reason = reason
        if reason == "stop":
            token_id = self._next_id(self.count - 1)
            ends_quietly = token_id == self.eos_token_id and token_id not in self.sampling.stop_token_ids
            self.stop_reason = None if ends_quietly else token_id
        self._finish()

    def abort(self) -> None:
        """Ends the answer from outside, with what it has."""
        if self._stops is not None:
            self._text += self._stops.take(final=True)
        self.finish_reason = "abort"
        self._finish()

    def _finish(self) -> None:
        self.prompt.open -= 1
        self.prompt.longest = max(self.prompt.longest, self.count)
        if self.reply.write is not None:
            self._send(self.finish_reason)
        self.reply.choice_ended()

    def _send(self, finish_reason: str | None) -> None:
        """Writes what is held as one chunk."""
        reply, bodies, write = self.reply, self.reply.bodies, self.reply.write
        assert write is not None
        prompt_ids = None
        used = None
        text, self._text = self._text, ""
        prompt_tokens = len(self.prompt.ids)
        if not self._started:
            self._started = True
            told = self.prompt.ids if reply.return_token_ids or reply.echo else None
            before = bodies.running_usage(prompt_tokens, 0) if reply.continuous_usage else None
            first = bodies.first_event(Piece(self.index, "", prompt_ids=told), reply.prompt_text, before)
            if first:
                write(first)
            prompt_ids = told
            if reply.echo:
                text = self._echo(text)
            self._plain = (not reply.continuous_usage and not reply.return_token_ids and reply.logprobs is None) and (
                self._stops is None and reply.stream_interval == 1
            )
            if self._plain:
                self._before, self._after = bodies.plain_chunk(self.index)
        if reply.continuous_usage:
            used = bodies.running_usage(prompt_tokens, self.count)
        thinking = self.count <= reply.reasoning_tokens
        new_ids, self._new_ids, self._since = self._new_ids, [], 0
        write(
            bodies.chunk(
                Piece(
                    self.index,
                    "" if thinking else text,
                    finish_reason,
                    self.stop_reason,
                    reasoning=text if thinking else None,
                    token_ids=new_ids if reply.return_token_ids else None,
                    prompt_ids=prompt_ids,
                    logprobs=self._logprobs(new_ids),
                ),
                used,
                fingerprint=finish_reason is not None and not reply.include_usage,
            )
        )

    def _echo(self, text: str) -> str:
        shown = "" if self.reply.return_token_ids else self.prompt.text or ""
        return shown if self.reply.echo_only else shown + text

    def _logprobs(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        wanted = self.reply.logprobs
        if wanted is None:
            return None
        told = wanted.of(token_ids, self._tokenizer, self._text_offset)
        self._text_offset += sum(map(len, told.get("tokens", ())))
        return told

    def row(self) -> dict[str, Any]:
        """This choice in a whole answer."""
        ids = self._sequence.output_token_ids(0, self.count)
        if self._stops is not None:
            text = self._stops.text
        else:
            hides_last = self.finish_reason == "stop" and not self.sampling.include_stop
            decoder = self._tokenizer.decoder(self.sampling.skip_special_tokens)
            text = "".join(map(decoder.push, ids[:-1] if hides_last else ids))
        reasoning = None
        if self.reply.reasoning_tokens:
            reasoning = self._tokenizer.decode(ids[: self.reply.reasoning_tokens], self.sampling.skip_special_tokens)
            reasoning, text = text[: len(reasoning)], text[len(reasoning) :]
        if self.reply.echo:
            text = self._echo(text)
        told = self.reply.return_token_ids
        assert self.finish_reason is not None
        return self.reply.bodies.choice(
            Piece(
                self.index,
                text,
                self.finish_reason,
                self.stop_reason,
                reasoning=reasoning,
                token_ids=ids if told else None,
                prompt_ids=self.prompt.ids if told else None,
                logprobs=self._logprobs(ids),
            )
        )


def _nothing() -> None:
    return None
