"""The request bodies of the routes as the server declares them: fields, types and their order.

The order matters because complaints are listed in it. Fields that a mock has no use for (penalties, tools, guided
decoding) are still declared, so that a wrong type is refused here as it would be there.
"""

from __future__ import annotations

from mock_engine.validate import (
    AnyValue,
    Bool,
    Dict,
    Field,
    Float,
    Int,
    Kind,
    List,
    Literal,
    Model,
    Optional,
    Str,
    Union,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DEFAULT_MAX_TOKENS = 16  # of a completion; a chat answer may fill the context
STOP_STRINGS_MAX = 4


def _optional(kind: Kind, default: object = None) -> Field:
    return Field(Optional(kind), default)


TOKEN_ID = Int(ge=0)
PROMPT = Union((List(TOKEN_ID), List(List(TOKEN_ID)), Str(), List(Str())))
STOP = Union((Str(), List(Str(), max_length=STOP_STRINGS_MAX)))
STREAM_OPTIONS = Model({"include_usage": _optional(Bool(), True), "continuous_usage_stats": _optional(Bool(), False)})
XARG = Union((Str(), Int(), Float(), List(Union((Str(), Int(), Float())))))
TOOL = Model(
    {
        "type": Field(Literal(("function",)), "function"),
        "function": Field(
            Model(
                {
                    "name": Field(Str(), required=True),
                    "description": _optional(Str()),
                    "parameters": _optional(Dict()),
                    "strict": _optional(Bool()),
                }
            ),
            required=True,
        ),
    }
)

_SAMPLING: dict[str, Field] = {
    "use_beam_search": Field(Bool(), False),
    "top_k": _optional(Int()),
    "min_p": _optional(Float()),
    "repetition_penalty": _optional(Float()),
    "length_penalty": Field(Float(), 1.0),
    "stop_token_ids": _optional(List(Int()), []),
    "include_stop_str_in_output": Field(Bool(), False),
    "ignore_eos": Field(Bool(), False),
    "min_tokens": Field(Int(), 0),
    "skip_special_tokens": Field(Bool(), True),
    "spaces_between_special_tokens": Field(Bool(), True),
    "truncate_prompt_tokens": _optional(Int(ge=-1, le=INT64_MAX)),
    "truncation_side": _optional(Literal(("left", "right"))),
    "allowed_token_ids": _optional(List(Int())),
    "prompt_logprobs": _optional(Int()),
    "logprob_token_ids": _optional(List(Int(), min_length=1)),
    "bad_words": Field(List(Str()), []),
}

_EXTRA: dict[str, Field] = {
    "response_format": _optional(Model({"type": Field(Str(), required=True), "json_schema": _optional(Dict())})),
    "structured_outputs": _optional(AnyValue()),
    "priority": Field(Int(ge=INT64_MIN, le=INT64_MAX), 0),
    "request_id": Field(Str()),
    "session_id": _optional(Str()),
    "return_tokens_as_token_ids": _optional(Bool()),
    "return_token_ids": _optional(Bool()),
    "routed_experts_prompt_start": Field(Int(ge=0), 0),
    "return_token_offsets": _optional(Bool(), False),
    "return_prompt_text": _optional(Bool()),
    "cache_salt": _optional(Str()),
    "kv_transfer_params": _optional(Dict()),
    "ec_transfer_params": _optional(Dict()),
    "vllm_xargs": _optional(Dict(XARG)),
    "repetition_detection": _optional(AnyValue()),
    "thinking_token_budget": _optional(Int()),
    "stream_interval": _optional(Int(ge=1)),
}

COMPLETION = Model(
    {
        "model": _optional(Str()),
        "prompt": _optional(PROMPT),
        "echo": _optional(Bool(), False),
        "frequency_penalty": _optional(Float()),
        "logit_bias": _optional(Dict(Float())),
        "logprobs": _optional(Int()),
        "max_tokens": _optional(Int(), DEFAULT_MAX_TOKENS),
        "n": Field(Int(), 1),
        "presence_penalty": _optional(Float()),
        "seed": _optional(Int(ge=INT64_MIN, le=INT64_MAX)),
        "stop": _optional(STOP, []),
        "stream": _optional(Bool(), False),
        "stream_options": _optional(STREAM_OPTIONS),
        "suffix": _optional(Str()),
        "temperature": _optional(Float()),
        "top_p": _optional(Float()),
        "user": _optional(Str()),
        **_SAMPLING,
        "add_special_tokens": Field(Bool(), True),
        **_EXTRA,
    }
)

_CONTENT = Union((Str(), List(AnyValue(), iterable=True)))
_ROLE_FIELDS: dict[str, dict[str, Field]] = {
    "Developer": {"content": Field(_CONTENT, required=True), "role": Field(Literal(("developer",)), required=True)},
    "System": {"content": Field(_CONTENT, required=True), "role": Field(Literal(("system",)), required=True)},
    "User": {"content": Field(_CONTENT, required=True), "role": Field(Literal(("user",)), required=True)},
    "Assistant": {"role": Field(Literal(("assistant",)), required=True), "content": _optional(_CONTENT)},
    "Tool": {
        "content": Field(_CONTENT, required=True),
        "role": Field(Literal(("tool",)), required=True),
        "tool_call_id": Field(Str(), required=True),
    },
    "Function": {
        "content": Field(Optional(Str()), required=True),
        "name": Field(Str(), required=True),
        "role": Field(Literal(("function",)), required=True),
    },
}
_CUSTOM = Model(
    {"role": Field(Str(), required=True), "content": Field(Union((Str(), List(AnyValue()))))}, typed_dict=True
)
_HARMONY = Model(
    {
        "author": Field(Model({"role": Field(Str(), required=True), "name": _optional(Str())}), required=True),
        "content": Field(List(AnyValue()), []),
    }
)
MESSAGE = Union(
    (*(Model(fields, typed_dict=True) for fields in _ROLE_FIELDS.values()), _CUSTOM, _HARMONY),
    tags=(
        *(f"ChatCompletion{role}MessageParam" for role in _ROLE_FIELDS),
        "CustomChatCompletionMessageParam",
        "Message",
    ),
)


class Messages(Kind):
    """A list of messages. The union only decides whether a message is acceptable: what goes on to the template is
    the message as sent, since a template may read fields that no branch declares."""

    def parse(self, value: object, loc: tuple[str | int, ...], problems: list, strict: bool = False) -> object:
        if not isinstance(value, list):
            return List(MESSAGE).parse(value, loc, problems, strict)
        for at, message in enumerate(value):
            plain = isinstance(message, dict) and isinstance(message.get("content"), str)
            if not (plain and isinstance(message.get("role"), str)):
                MESSAGE.parse(message, (*loc, at), problems, strict)
        return value


CHAT = Model(
    {
        "messages": Field(Messages(), required=True),
        "model": _optional(Str()),
        "frequency_penalty": _optional(Float()),
        "logit_bias": _optional(Dict(Float())),
        "logprobs": _optional(Bool(), False),
        "top_logprobs": _optional(Int(), 0),
        "max_tokens": _optional(Int()),
        "max_completion_tokens": _optional(Int()),
        "n": _optional(Int(), 1),
        "presence_penalty": _optional(Float()),
        "seed": _optional(Int(ge=INT64_MIN, le=INT64_MAX)),
        "stop": _optional(STOP, []),
        "stream": _optional(Bool(), False),
        "stream_options": _optional(STREAM_OPTIONS),
        "temperature": _optional(Float()),
        "top_p": _optional(Float()),
        "tools": _optional(List(TOOL)),
        "tool_choice": _optional(AnyValue(), "none"),
        "reasoning_effort": _optional(Literal(("none", "minimal", "low", "medium", "high", "xhigh", "max"))),
        "include_reasoning": Field(Bool(), True),
        "parallel_tool_calls": _optional(Bool(), True),
        "user": _optional(Str()),
        **_SAMPLING,
        "echo": Field(Bool(), False),
        "add_generation_prompt": Field(Bool(), True),
        "continue_final_message": Field(Bool(), False),
        "add_special_tokens": Field(Bool(), False),
        "documents": _optional(List(Dict(Str()))),
        "chat_template": _optional(Str()),
        "chat_template_kwargs": _optional(Dict()),
        **_EXTRA,
    }
)

TOKENIZE_PROMPT = Model(
    {
        "model": _optional(Str()),
        "prompt": Field(Str(), required=True),
        "add_special_tokens": Field(Bool(), True),
        "return_token_strs": _optional(Bool(), False),
    }
)
TOKENIZE_CHAT = Model(
    {
        "model": _optional(Str()),
        "messages": Field(Messages(), required=True),
        "add_generation_prompt": Field(Bool(), True),
        "return_token_strs": _optional(Bool(), False),
        "continue_final_message": Field(Bool(), False),
        "add_special_tokens": Field(Bool(), False),
        "chat_template": _optional(Str()),
        "chat_template_kwargs": _optional(Dict()),
        "tools": _optional(List(TOOL)),
    }
)
DETOKENIZE = Model({"model": _optional(Str()), "tokens": Field(List(TOKEN_ID), required=True)})
LOAD_LORA = Model(
    {
        "lora_name": Field(Str(), required=True),
        "lora_path": Field(Str(), required=True),
        "load_inplace": Field(Bool(), False),
    }
)
UNLOAD_LORA = Model({"lora_name": Field(Str(), required=True), "lora_int_id": _optional(Int())})
ABORT_REQUESTS = Model({"request_ids": _optional(List(Str()))})

_COMPLETION_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "min_tokens", "logprobs",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
)  # fmt: skip
SAMPLING_PARAMS = Model(
    {
        **{name: COMPLETION.fields[name] for name in _COMPLETION_SAMPLING},
        "stop": _optional(Union((Str(), List(Str()))), []),
        "max_tokens": _optional(Int()),
        "detokenize": Field(Bool(), True),
    }
)
GENERATE = Model(
    {
        "request_id": Field(Str()),
        "token_ids": Field(List(TOKEN_ID, min_length=1), required=True),
        "features": _optional(AnyValue()),
        "content_parts": _optional(List(Dict())),
        "sampling_params": Field(SAMPLING_PARAMS, required=True),
        "model": _optional(Str()),
        "return_token_ids": _optional(Bool()),
        "output_mode": Field(Literal(("tokens", "text")), "tokens"),
        "stream": _optional(Bool(), False),
        "stream_options": _optional(STREAM_OPTIONS),
        "cache_salt": _optional(Str()),
        "priority": Field(Int(ge=INT64_MIN, le=INT64_MAX), 0),
        "kv_transfer_params": _optional(Dict()),
        "ec_transfer_params": _optional(Dict()),
    }
)

_BLOCK = Model(
    {
        "type": Field(
            Literal(
                ("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"),
            ),
            required=True,
        ),
        "text": _optional(Str()),
        "source": _optional(Dict()),
        "id": _optional(Str()),
        "tool_use_id": _optional(Str()),
        "name": _optional(Str()),
        "input": _optional(Dict()),
        "content": _optional(Union((Str(), List(Dict())))),
        "thinking": _optional(Str()),
    }
)
_BLOCKS = Union((Str(), List(_BLOCK)))
ANTHROPIC = Model(
    {
        "model": Field(Str(min_length=1), required=True),
        "messages": Field(
            List(
                Model(
                    {
                        "role": Field(Literal(("user", "assistant", "system")), required=True),
                        "content": Field(_BLOCKS, required=True),
                    }
                )
            ),
            required=True,
        ),
        "max_tokens": Field(Int(ge=1), required=True),
        "stop_sequences": _optional(List(Str())),
        "stream": _optional(Bool(), False),
        "system": _optional(_BLOCKS),
        "temperature": _optional(Float()),
        "tools": _optional(
            List(
                Model(
                    {
                        "name": Field(Str(), required=True),
                        "description": _optional(Str()),
                        "input_schema": Field(Dict(), required=True),
                    }
                )
            )
        ),
        "top_k": _optional(Int()),
        "top_p": _optional(Float()),
        "kv_transfer_params": _optional(Dict()),
        "chat_template_kwargs": _optional(Dict()),
    }
)

_ITEM = Model(
    {
        "type": _optional(Str()),
        "role": _optional(Str()),
        "content": _optional(Union((Str(), List(Dict())))),
        "call_id": _optional(Str()),
        "name": _optional(Str()),
        "arguments": _optional(Str()),
        "output": _optional(Union((Str(), List(Dict())))),
    }
)
RESPONSES = Model(
    {
        "input": Field(Union((Str(), List(_ITEM))), required=True),
        "instructions": _optional(Str()),
        "max_output_tokens": _optional(Int()),
        "model": _optional(Str()),
        "previous_response_id": _optional(Str()),
        "stream": _optional(Bool(), False),
        "temperature": _optional(Float()),
        "tools": Field(List(Dict()), []),
        "top_p": _optional(Float()),
        "request_id": Field(Str()),
        "cache_salt": _optional(Str()),
        "priority": Field(Int(), 0),
        "kv_transfer_params": _optional(Dict()),
        "ec_transfer_params": _optional(Dict()),
    }
)
