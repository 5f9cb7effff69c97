"""Conversations in the bodies of two other APIs, Anthropic's messages and OpenAI's responses, as chat requests.

Only what a text model renders is carried over: text, tool calls and their results, thinking. The result has the fields
of a chat request, with its defaults, so it goes through the very code that renders one.
"""

from __future__ import annotations

import json
from typing import Any

from mock_engine.errors import RequestError
from mock_engine.protocol import bad_request, check
from mock_engine.schemas import ANTHROPIC, CHAT, RESPONSES

_CHAT_DEFAULTS = {name: declared.default for name, declared in CHAT.fields.items()}


def from_anthropic(body: Any) -> dict[str, Any]:
    fields = check(ANTHROPIC, body)
    messages: list[dict[str, Any]] = []
    system = [fields["system"], *(one["content"] for one in fields["messages"] if one["role"] == "system")]
    text = "".join(_system_text(content) for content in system if content)
    if text:
        messages.append({"role": "system", "content": text})
    for message in fields["messages"]:
        if message["role"] != "system":
            messages += _turns(message)
    tools = fields["tools"]
    streams = bool(fields["stream"])
    return {
        **_CHAT_DEFAULTS,
        "messages": messages,
        "model": fields["model"],
        "max_tokens": fields["max_tokens"],
        "max_completion_tokens": fields["max_tokens"],
        "stop": fields["stop_sequences"],
        "stream": fields["stream"],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if streams else None,
        **{name: fields[name] for name in ("temperature", "top_p", "top_k")},
        "tools": None
        if tools is None
        else [_function(one["name"], one["description"], one["input_schema"]) for one in tools],
        "tool_choice": "none" if tools is None else "auto",
        **{name: fields[name] for name in ("kv_transfer_params", "chat_template_kwargs")},
    }


def _function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _system_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block["text"] or "" for block in content if block["type"] == "text")


def _turns(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message of Anthropic's is a chat message, with a tool message before it for each result of a tool."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind = block["type"]
        if kind == "image":
            raise bad_request("At most 0 image(s) may be provided in one prompt.")
        if kind == "text" and block["text"]:
            texts.append(block["text"])
        elif kind == "thinking" and block["thinking"] is not None:
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            arguments = json.dumps(block["input"] or {})
            function = {"name": block["name"] or "", "arguments": arguments}
            calls.append({"id": block["id"] or "", "type": "function", "function": function})
        elif kind == "tool_result":
            result = _result_text(block["content"])
            turns.append({"role": "tool", "tool_call_id": block["tool_use_id"] or "", "content": result})
    told: dict[str, Any] = {"role": role}
    if texts:
        parts = [{"type": "text", "text": text} for text in texts]
        told["content"] = texts[0] if len(texts) == 1 else parts
    if thoughts:
        told["reasoning"] = "".join(thoughts)
    if calls:
        told["tool_calls"] = calls
    if role == "assistant" or texts:
        turns.append(told)
    return turns


def _result_text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def from_responses(body: Any) -> dict[str, Any]:
    fields = check(RESPONSES, body)
    if fields["previous_response_id"] is not None:
        raise RequestError(
            400,
            "previous_response_id is not supported by the stateless render endpoint.",
            "invalid_request_error",
            "previous_response_id",
        )
    messages: list[dict[str, Any]] = []
    if fields["instructions"]:
        messages.append({"role": "system", "content": fields["instructions"]})
    given = fields["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += [_item(item) for item in given if item["type"] != "reasoning"]
    functions = [tool for tool in fields["tools"] if tool.get("type") == "function"]
    return {
        **_CHAT_DEFAULTS,
        "messages": messages,
        "max_tokens": fields["max_output_tokens"],
        "tools": [_function(one.get("name", ""), one.get("description"), one.get("parameters")) for one in functions]
        or None,
        "tool_choice": "auto" if functions else "none",
        **{name: fields[name] for name in ("model", "stream", "temperature", "top_p", "request_id", "cache_salt")},
        **{name: fields[name] for name in ("priority", "kv_transfer_params", "ec_transfer_params")},
    }


def _item(item: dict[str, Any]) -> dict[str, Any]:
    """One item of a response's input as a chat message."""
    kind = item["type"] or "message"
    if kind == "function_call":
        function = {"name": item["name"] or "", "arguments": item["arguments"] or ""}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"] or "", "content": _parts(item["output"])}
    if kind != "message" or item["role"] is None:
        raise bad_request(
            f"This replica renders messages, function calls and their outputs, not items of type {kind!r}."
        )
    return {"role": item["role"], "content": _parts(item["content"])}


def _parts(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """Parts of text under the names that chat knows; others are refused where chat refuses them."""
    if not isinstance(content, list):
        return content or ""
    return [
        {"type": "text", "text": part.get("text", "")} if part.get("type") in ("input_text", "output_text") else part
        for part in content
    ]
