"""From the bytes of a request to its fields, or to the error that a vLLM server answers.

The checks run in the real server's order, because a request with two faults is answered for the first: the body's
JSON, then the rules that look at several fields, then every field's type; later, elsewhere, the model's name, the
prompt's length and the sampling values. Pure: bytes and headers in, values or RequestError out.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mock_engine.errors import RequestError
from mock_engine.schemas import CHAT, COMPLETION, DEFAULT_MAX_TOKENS, GENERATE
from mock_engine.validate import Kind, Loc, Model, Problem, problem, report

PROMPTS_MAX = 1024
CACHE_SALT_CHARS_MAX = 128

_decode_json = msgspec.json.Decoder().decode


def bad_request(message: str, param: str | None = None, value: object = None) -> RequestError:
    """A 400 whose message names the parameter, and its value if one is given, as the real server's does."""
    if param is not None:
        message += f" (parameter={param}{'' if value is None else f', value={value}'})"
    return RequestError(400, message, "BadRequestError", param)


def clean(text: str) -> str:
    """A client's name for something, without what UTF-8 cannot carry into logs, headers and events."""
    return text.encode("utf-8", "replace").decode("utf-8")


def invalid(problems: list[Problem] | list[str]) -> RequestError:
    message, param = report(problems)
    return RequestError(400, message, "Bad Request", param)


def read_json(raw: bytes, content_type: str) -> Any:
    """The body's JSON value; None for an empty body."""
    media_type = content_type.lower().partition(";")[0].strip()
    if media_type != "application/json":
        raise invalid(["Unsupported Media Type: Only 'application/json' is allowed"])
    if not raw:
        return None
    try:
        return _decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the standard library reads a little more (NaN, lone surrogates) and words the error we must give
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        complaint = problem("json_invalid", ("body", error.pos), "JSON decode error", {}, {"error": error.msg})
        raise invalid([complaint]) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, "There was an error parsing the body", "Bad Request") from error


def check(kind: Kind, body: Any) -> dict[str, Any]:
    """The body's fields with their defaults, or the list of everything that is wrong with it."""
    loc: Loc = ("body",)
    if body is None:
        raise invalid([problem("missing", loc, "Field required", None)])
    problems: list[Problem] = []
    parsed = kind.parse(body, loc, problems)
    if problems:
        raise invalid(problems)
    return dict(parsed)


def parse_completion(body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        _check_prompt(body)
        _check_stream_options(body)
        _check_logprobs(body, "logprobs")
        _check_response_format(body)
        _check_repetition(body)
        if body.get("max_tokens") is None:
            body = {**body, "max_tokens": DEFAULT_MAX_TOKENS}
        _check_cache_salt(body)
    fields = check(COMPLETION, body)
    if body.get("prompt_embeds") is not None:
        raise bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds")
    return fields


def parse_chat(body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        body = _check_tools(body)
        _check_logprobs(body, "top_logprobs")
        _check_stream_options(body)
        _check_response_format(body)
        _check_repetition(body)
        _check_cache_salt(body)
    return check(CHAT, body)


def parse_generate(body: Any) -> dict[str, Any]:
    """The fields of a request of token ids, with the sampling fields beside the others as in a completion's."""
    if isinstance(body, dict):
        _check_cache_salt(body)
    fields = check(GENERATE, body)
    chosen: dict[str, Any] = fields.pop("sampling_params")
    if fields["features"] is not None or fields["content_parts"]:
        raise bad_request("This model reads text only: send token_ids without features and content_parts.")
    if fields["output_mode"] != "tokens" and not chosen["detokenize"]:
        mode = fields["output_mode"]
        raise bad_request(f"output_mode={mode!r} requires sampling_params.detokenize to be true")
    if chosen["stop"] and not chosen["detokenize"]:
        raise bad_request("stop strings are only supported when detokenize is True. Set detokenize=True to use stop.")
    return {**_COMPLETION_DEFAULTS, **chosen, **fields}


_COMPLETION_DEFAULTS = {name: declared.default for name, declared in COMPLETION.fields.items()}


def parse_either(first: Model, second: Model, body: Any) -> tuple[Model, dict[str, Any]]:
    """A body that may have one of two shapes. If it fits both, the second wins; if none, both complain in order."""
    if body is None:
        raise invalid([problem("missing", ("body",), "Field required", None)])
    complaints: dict[int, list[Problem]] = {}
    for at, model in ((1, second), (0, first)):
        complaints[at] = []
        parsed = model.parse(body, ("body",), complaints[at])
        if not complaints[at]:
            return model, dict(parsed)
    raise invalid(complaints[0] + complaints[1])


def _check_prompt(body: dict[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > PROMPTS_MAX and not isinstance(prompt[0], int):
        raise bad_request(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {PROMPTS_MAX}. To increase this "
            f"limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    if (prompt is None or prompt == "") and not body.get("prompt_embeds"):
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def _check_stream_options(body: dict[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")


def _check_logprobs(body: dict[str, Any], name: str) -> None:
    for key in ("prompt_logprobs", name):
        value = body.get(key)
        if value is None:
            continue
        if not isinstance(value, (int, float)):
            raise bad_request(f"`{key}` must be an integer.", key, value)
        if key == "prompt_logprobs" and body.get("stream") and (value > 0 or value == -1):
            raise bad_request("`prompt_logprobs` are not available when `stream=True`.", key)
        if value < 0 and value != -1:
            raise bad_request(f"`{key}` must be a positive value or -1.", key, value)
        if key == "top_logprobs" and value != 0 and not body.get("logprobs"):
            raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", key)


def _check_response_format(body: dict[str, Any]) -> None:
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise bad_request(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )


def _check_repetition(body: dict[str, Any]) -> None:
    wanted = body.get("repetition_detection")
    if not isinstance(wanted, dict):
        return
    sizes = [wanted.get(key, 0) for key in ("min_pattern_size", "max_pattern_size", "min_count")]
    if not all(isinstance(size, int) for size in sizes):
        return
    smallest, largest, count = sizes
    if not 0 <= smallest <= largest:
        raise bad_request(
            "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. Set both to 0 "
            "to disable repetitive pattern detection."
        )
    if largest > 0 and count < 2:
        raise bad_request(
            "min_count must be >= 2 to detect repetitive patterns in engine output. If you do not wish to detect "
            "repetitive patterns, set max_pattern_size to 0."
        )


def _check_cache_salt(body: dict[str, Any]) -> None:
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > CACHE_SALT_CHARS_MAX:
        raise bad_request(
            f"Parameter 'cache_salt' must be at most {CACHE_SALT_CHARS_MAX} characters, got {len(salt)}.", "cache_salt"
        )
    if any(character in salt for character in "@/\\\0") or clean(salt) != salt:
        raise bad_request("Parameter 'cache_salt' must not contain '@', '/', '\\' or NUL characters.", "cache_salt")


def _check_tools(body: dict[str, Any]) -> dict[str, Any]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        raise bad_request(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if "tool_choice" not in body:
        return {**body, "tool_choice": "auto"} if tools else body
    if choice is None or choice == "none":
        return body
    if tools is None:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        raise bad_request(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )
    if isinstance(choice, dict):
        _check_named_tool(choice, tools)
    return body


def _check_named_tool(choice: dict[str, Any], tools: Any) -> None:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise bad_request(
            f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad_request(
            f"Invalid `name` in `function`: `{name}` in `tool_choice`! {usage}", "tool_choice.function.name"
        )
    known = [tool.get("function", {}).get("name") for tool in tools if isinstance(tool, dict)]
    if name not in known:
        raise bad_request(
            "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
        )
