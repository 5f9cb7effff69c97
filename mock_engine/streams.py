"""One sample on its way to a client: tokens become text, text becomes chunks or a part of one body.

The driver calls a `Choice` at the instant a token becomes visible; nothing here waits. The odd thing is a client that
reads slowly: its tokens are held and merged into fewer chunks, as in vLLM, so it can neither stall the others nor fill
the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mock_engine.bodies import Piece, encode_json
from mock_engine.logprobs import prompt_logprobs
from mock_engine.reply import Prompt, Reply
from mock_engine.request import Request, TokenSequence
from mock_engine.sampling import Sampling
from mock_engine.stops import StopScanner
from mock_engine.tokenizer import Decoder, Tokenizer

UNSENT_BYTES_MAX = 64 * 1024  # with more than this unsent, a stream's tokens are held back and merged
IDS_AHEAD = 64  # output ids are fetched this many at a time


class Choice:
    """One sample of one prompt: an engine request with its text. Instants are microseconds of the model's clock."""

    __slots__ = (
        "_after", "_before", "_decoder", "_ids", "_ids_start", "_new_ids", "_plain", "_sequence", "_since",
        "_started", "_stops", "_text", "_text_offset", "_tokenizer", "admitted_us", "arrived_us",
        "cached_tokens", "count", "eos_token_id", "finish_reason", "first_us", "index", "last_us",
        "preemptions", "preemptions_uncounted", "prompt", "reply", "request", "sampling", "stop_reason",
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
        self.preemptions_uncounted = 0  # of these, what no metric knows yet
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
        self._new_ids: list[int] = []  # ids not sent yet, of an answer that tells them
        self._since = 0  # tokens since the last chunk
        self._started = False  # the first chunk is out
        self._plain = False  # chunks differ in their text only
        self._before = self._after = b""
        reply.add(self)

    @property
    def request_id(self) -> str:
        return self.request.request_id

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
        if reply.tells_ids:
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
        new_ids, self._new_ids, self._since = self._new_ids, [], 0
        told_ids, unknown = new_ids, 0
        if not self._started:
            self._started = True
            reply.begin()
            prompt_ids = self.prompt.ids if reply.return_token_ids or reply.echo else None
            if reply.echo:
                text = self._echo(text)
                told_ids, unknown = self._echo_ids(new_ids), 1
            self._plain = (not reply.continuous_usage and not reply.return_token_ids and reply.logprobs is None) and (
                self._stops is None and reply.stream_interval == 1
            )
            if self._plain:
                self._before, self._after = bodies.plain_chunk(self.index)
        if reply.continuous_usage:
            used = bodies.running_usage(prompt_tokens, self.count)
        thinking = self.count <= reply.reasoning_tokens
        hidden = thinking and reply.hide_reasoning
        if hidden and finish_reason is None:
            return
        logprobs = self._logprobs(told_ids, self._text_offset, unknown)
        self._text_offset += len(text)
        write(
            bodies.chunk(
                Piece(
                    self.index,
                    "" if thinking else text,
                    finish_reason,
                    self.stop_reason,
                    reasoning=text if thinking and not hidden else None,
                    silent=hidden,
                    token_ids=new_ids if reply.return_token_ids and not reply.hide_reasoning else None,
                    prompt_ids=prompt_ids,
                    logprobs=logprobs,
                ),
                used,
                fingerprint=finish_reason is not None and not reply.include_usage,
            )
        )

    def _echo(self, text: str) -> str:
        shown = "" if self.reply.return_token_ids else self.prompt.text or ""
        return shown if self.reply.echo_only else shown + text

    def _echo_ids(self, new_ids: list[int]) -> list[int]:
        return self.prompt.ids if self.reply.echo_only else self.prompt.ids + new_ids

    def _logprobs(self, token_ids: Sequence[int], text_offset: int, unknown: int) -> dict[str, Any] | None:
        wanted = self.reply.logprobs
        return None if wanted is None else wanted.of(token_ids, self._tokenizer, text_offset, unknown)

    def prompt_logprobs(self) -> list[Any] | None:
        wanted = self.sampling.prompt_logprobs
        return None if wanted is None else prompt_logprobs(self.prompt.ids, wanted, self._tokenizer)

    def timings(self) -> dict[str, Any]:
        """Per-request metrics in milliseconds of model time."""
        first, last, admitted = self.first_us, self.last_us, self.admitted_us
        assert first is not None
        assert last is not None
        queued_us = 0 if admitted is None else admitted - self.arrived_us
        decode_us = last - first
        return {
            "time_to_first_token_ms": (first - self.arrived_us) / 1000,
            "generation_time_ms": decode_us / 1000,
            "queue_time_ms": queued_us / 1000,
            "mean_itl_ms": decode_us / 1000 / max(1, self.count - 1),
            "tokens_per_second": self.count / max(1, last - self.arrived_us) * 1e6,
        }

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
        hides = self.reply.hide_reasoning
        told_ids, unknown = ids, 0
        if self.reply.echo:
            text = self._echo(text)
            told_ids, unknown = self._echo_ids(ids), 1
        told = self.reply.return_token_ids
        assert self.finish_reason is not None
        return self.reply.bodies.choice(
            Piece(
                self.index,
                text,
                self.finish_reason,
                self.stop_reason,
                reasoning=None if hides else reasoning,
                silent=hides and not text,
                token_ids=ids if told and not hides else None,
                prompt_ids=self.prompt.ids if told else None,
                logprobs=self._logprobs(told_ids, 0, unknown),
                prompt_logprobs=self.prompt_logprobs(),
            )
        )
