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
    token_ids: msgspec.Raw = _ABSENT  # this and `sampling_params`: vLLM's /inference/v1/generate
    sampling_params: msgspec.Raw = _ABSENT
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    priority: int | None = None
    session_id: str | None = None
    cache_salt: str | None = None
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
    """Token ids of a prompt that is one list of ids (or a list of one such list), wherever its route has them."""
    raw = body.prompt if given(body.prompt) or given(body.messages) else body.token_ids
    if not given(raw):
        return None
    try:
        return _IDS.decode(raw)
    except msgspec.DecodeError:
        value = _anything(raw)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        ids = value[0]
        return ids if all(type(item) is int for item in ids) else None
    return None


def output_limit(body: GenerationBody) -> int | None:
    """What the client asks for at most."""
    limit = body.max_completion_tokens or body.max_tokens
    if limit is None and given(body.sampling_params):
        params = _anything(body.sampling_params)
        found = params.get("max_tokens") if isinstance(params, dict) else None
        limit = found if type(found) is int else None
    return limit


def prompt_text(body: GenerationBody, join: str = "\n") -> str | None:
    """Text of a prompt, or of the messages joined; None for ids, and for several prompts unless joined by a space.

    Joined by a newline as production-stack does, by a space without empty ones as SGLang's gateway, by nothing, parts
    of a message included, as Ray.
    """
    if given(body.messages):
        messages = _anything(body.messages)
        if not isinstance(messages, list):
            return None
        contents = [_content(message, join) for message in messages]
        return join.join(filter(None, contents) if join == " " else contents)
    if not given(body.prompt):
        return None
    value = _anything(body.prompt)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        value = join.join(value) if len(value) == 1 or join != "\n" else None
    return value if isinstance(value, str) else None


def cut_body(body: GenerationBody, raw: bytes, kept: int) -> GenerationBody:
    """The body as one sees it who reads its first `kept` bytes only: a prompt ends where they end, the messages too.
    Small fields are read whole, wherever they stand."""
    if len(raw) <= kept:
        return body
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    for name in ("prompt", "messages", "token_ids"):
        value = bytes(getattr(body, name))
        start = raw.find(value) if value else -1
        if start >= 0 and start + len(value) > kept:
            fields[name] = msgspec.Raw(_cut(value, max(0, kept - start)))
    return GenerationBody(**fields)


def _cut(value: bytes, kept: int) -> bytes:
    """Valid JSON for the first `kept` bytes of a JSON value: a text, a list of ids, or a list of messages."""
    whole = _ANY.decode(value)
    if isinstance(whole, str):
        return msgspec.json.encode(whole.encode("utf-8", "surrogatepass")[: max(0, kept - 1)].decode("utf-8", "ignore"))
    if not isinstance(whole, list):
        return b"null"
    found: list[Any] = []
    left = kept - 1
    for item in whole:
        size = len(msgspec.json.encode(item)) + 1
        if size > left:
            if isinstance(item, str):
                found.append(item.encode()[: max(0, left)].decode("utf-8", "ignore"))
            elif isinstance(item, list):  # one prompt of ids in a list of its own
                found.append(item[: max(0, left) * len(item) // size])
            elif isinstance(item, dict) and isinstance(item.get("content"), str):
                short = item["content"].encode()[: max(0, left)].decode("utf-8", "ignore")
                found.append({**item, "content": short})
            break
        left -= size
        found.append(item)
    return msgspec.json.encode(found)


def _anything(raw: msgspec.Raw) -> Any:
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _content(message: Any, join: str) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return ("" if join == "" else " ").join(part for part in parts if isinstance(part, str))
    return ""
