"""What a router reads of a generation request's body, and no more: prompt, session, limits.

A body that cannot be read is no error here: the replica will answer it as it answers everything, and the policy
places it by what else is known.
"""

from __future__ import annotations

from typing import Any

import msgspec

_ABSENT = msgspec.Raw(b"")


class GenerationBody(msgspec.Struct):
    """Fields as the OpenAI routes and vLLM name them; the large ones stay undecoded until somebody asks."""

    model: str | None = None
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    priority: int | None = None
    session_id: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT


_BODY = msgspec.json.Decoder(GenerationBody)
_IDS = msgspec.json.Decoder(list[int])
_ANY = msgspec.json.Decoder()


def read_body(body: bytes) -> GenerationBody | None:
    """None for what is no JSON object with fields of these kinds."""
    try:
        return _BODY.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def given(raw: msgspec.Raw) -> bool:
    """Whether an undecoded field was there and not null."""
    view = memoryview(raw)
    return len(view) > 4 or bytes(view) not in (b"", b"null")


def prompt_ids(body: GenerationBody) -> list[int] | None:
    """Token ids of a prompt that is one list of ids (or a list of one such list)."""
    if not given(body.prompt):
        return None
    try:
        return _IDS.decode(body.prompt)
    except msgspec.DecodeError:
        value = _anything(body.prompt)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        ids = value[0]
        return ids if all(type(item) is int for item in ids) else None
    return None


def prompt_text(body: GenerationBody) -> str | None:
    """Text of a prompt, or of the messages joined by newlines; None for several prompts and for ids."""
    if given(body.messages):
        messages = _anything(body.messages)
        if not isinstance(messages, list):
            return None
        return "\n".join(_content(message) for message in messages)
    if not given(body.prompt):
        return None
    value = _anything(body.prompt)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None


def _anything(raw: msgspec.Raw) -> Any:
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return " ".join(part for part in parts if isinstance(part, str))
    return ""
