"""The JSON of answers: whole bodies and stream chunks, key by key in the order in which a vLLM server writes them.

A stream's ordinary chunk differs from the next only in its text, so everything around the text is encoded once a
request; first, last and usage-bearing chunks are written out in full. Pure: values in, bytes out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_HOLE = "\x00text\x00"  # stands for the text while the constant parts of a chunk are encoded


def encode_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate, which UTF-8 cannot hold, is escaped."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_body(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(
    prompt_tokens: int, completion_tokens: int, details: dict[str, Any] | None = None, *, streamed: bool = False
) -> dict[str, Any]:
    """The usage object; in a stream nulls are left out."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if not streamed:
        return {**found, "prompt_tokens_details": details, "completion_tokens_details": None}
    if details is not None:
        found["prompt_tokens_details"] = {key: value for key, value in details.items() if value is not None}
    return found


def prompt_details(cached_tokens: int, created_tokens: int | None) -> dict[str, Any]:
    return {"cached_tokens": cached_tokens, "created_cache_tokens": created_tokens, "multimodal_tokens": None}


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice says now: in a stream since its last chunk, in a whole body altogether."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | None = None
    prompt_ids: Sequence[int] | None = None
    logprobs: Any = None
    reasoning: str | None = None  # of a chat; while it is told there is no text
    silent: bool = False  # neither text nor reasoning, not even an empty one
    prompt_logprobs: Any = None


class Bodies:
    """Bodies of one request; the two kinds of route differ in the methods that they fill in."""

    prefix: str  # of the response id

    def __init__(self, response_id: str, created: int, model: str, fingerprint: str, kind: str) -> None:
        self.response_id = response_id
        self._head = {"id": response_id, "object": kind, "created": created, "model": model}
        self._fingerprint = fingerprint

    def first_events(self, piece: Piece, prompt_text: str | None, used: dict[str, Any] | None) -> bytes:
        """What leaves for a choice together with the first token of any, before it."""
        raise NotImplementedError

    def choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any], **rest: Any) -> bytes:
        """`rest` may hold metrics, prompt_ids, prompt_text and prompt_logprobs."""
        raise NotImplementedError

    def running_usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        raise NotImplementedError

    def error_event(self, body: dict[str, Any]) -> bytes:
        raise NotImplementedError

    def _delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def plain_chunk(self, index: int) -> tuple[bytes, bytes]:
        """What precedes and follows the text of an ordinary chunk."""
        before, _, after = self.chunk(Piece(index, _HOLE)).partition(encode_json(_HOLE))
        return before, after

    def chunk(self, piece: Piece, used: dict[str, Any] | None = None, fingerprint: bool = False) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": [self._delta(piece)]}
        if used is not None:
            chunk["usage"] = used
        if fingerprint:
            chunk["system_fingerprint"] = self._fingerprint
        return event({**chunk, "kv_transfer_params": None})

    def usage_chunk(self, used: dict[str, Any], metrics: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": [], "usage": used, "system_fingerprint": self._fingerprint}
        return event(chunk if metrics is None else {**chunk, "metrics": metrics})


class CompletionBodies(Bodies):
    prefix = "cmpl-"

    def __init__(self, response_id: str, created: int, model: str, fingerprint: str) -> None:
        super().__init__(response_id, created, model, fingerprint, "text_completion")

    def first_events(self, piece: Piece, prompt_text: str | None, used: dict[str, Any] | None) -> bytes:
        return b""  # the prompt's ids ride in the first chunk of text

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": piece.prompt_ids,
            "token_ids": piece.token_ids,
            "weight_versions": None,
        }

    def running_usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return usage(prompt_tokens, completion_tokens, streamed=True)

    def error_event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(body).encode() + b"\n\n"  # with a space after each separator

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids,
            "prompt_logprobs": piece.prompt_logprobs,
            "prompt_token_ids": piece.prompt_ids,
            "routed_experts": None,
            "weight_versions": None,
        }

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any], **rest: Any) -> bytes:
        return encode_json(
            {
                **self._head,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self._fingerprint,
                "usage": used,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": rest.get("metrics"),
            }
        )


class ChatBodies(Bodies):
    prefix = "chatcmpl-"

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        role: str = "assistant",
        continued: str = "",
    ) -> None:
        """`continued` is the message that the answer goes on with, if it is to be told again."""
        super().__init__(response_id, created, model, fingerprint, "chat.completion.chunk")
        self._role = role
        self._continued = continued

    def first_events(self, piece: Piece, prompt_text: str | None, used: dict[str, Any] | None) -> bytes:
        role = self._bare_chunk(piece.index, {"role": self._role, "content": ""}, used)
        first = event({**role, "prompt_token_ids": piece.prompt_ids, "prompt_text": prompt_text})
        if not self._continued:
            return first
        return first + event(self._bare_chunk(piece.index, {"content": self._continued}, used))

    def _bare_chunk(self, index: int, delta: dict[str, Any], used: dict[str, Any] | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        return chunk if used is None else {**chunk, "usage": used}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.reasoning is None else {"reasoning": piece.reasoning}
        choice: dict[str, Any] = {
            "index": piece.index,
            "delta": {} if piece.silent else delta,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is None:
            return {**choice, "token_ids": piece.token_ids}
        return {**choice, "stop_reason": piece.stop_reason, "token_ids": piece.token_ids, "weight_versions": None}

    def running_usage(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {**usage(prompt_tokens, completion_tokens, streamed=True), "completion_tokens_details": None}

    def error_event(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def choice(self, piece: Piece) -> dict[str, Any]:
        nothing = piece.silent or (piece.reasoning is not None and not piece.text)
        message = {
            "role": self._role,
            "content": None if nothing and not self._continued else self._continued + piece.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": piece.reasoning,
        }
        return {
            "index": piece.index,
            "message": message,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "token_ids": piece.token_ids,
            "routed_experts": None,
            "weight_versions": None,
        }

    def whole(self, choices: list[dict[str, Any]], used: dict[str, Any], **rest: Any) -> bytes:
        return encode_json(
            {
                **self._head,
                "object": "chat.completion",
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self._fingerprint,
                "usage": used,
                "prompt_logprobs": rest.get("prompt_logprobs"),
                "prompt_token_ids": rest.get("prompt_ids"),
                "prompt_text": rest.get("prompt_text"),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": rest.get("metrics"),
            }
        )
