"""From the bytes of a request to what is to be generated, or to the error that a vLLM server answers.

The checks run in the real server's order, because a request with two faults is answered for the first: the body's
JSON, then the rules that look at several fields, then every field's type, later the model's name, the prompt's
length and the sampling values. Pure: bytes and headers in, values or RequestError out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mock_engine.errors import RequestError
from mock_engine.schemas import CHAT, COMPLETION, DEFAULT_MAX_TOKENS
from mock_engine.validate import Kind, Loc, Model, Problem, problem, report

PROMPTS_MAX = 1024
CACHE_SALT_CHARS_MAX = 128
N_MAX = 16_384
MAX_LOGPROBS = 20
TEMPERATURE_GREEDY = 1e-5  # below this, sampling is greedy

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
        if body.get("max_tokens") is None:
            body = {**body, "max_tokens": DEFAULT_MAX_TOKENS}
        _check_cache_salt(body)
    return check(COMPLETION, body)


def parse_chat(body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        body = _check_tools(body)
        _check_logprobs(body, "top_logprobs")
        _check_stream_options(body)
        _check_response_format(body)
        _check_cache_salt(body)
    return check(CHAT, body)


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
    if prompt is None or prompt == "":
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """What of a request decides the length and the end of its answers."""

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    rendered: dict[str, Any] = field(default_factory=dict)  # the values that /render shows, in its order


_DEFAULTS: dict[str, float] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}


def sampling(fields: Mapping[str, Any], max_tokens: int) -> Sampling:
    """The checked sampling values; `max_tokens` is already bounded by the context."""
    n = 1 if fields["n"] is None else fields["n"]
    number = {key: default if fields[key] is None else fields[key] for key, default in _DEFAULTS.items()}
    stop = fields["stop"]
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    _check_ranges(n, number, max_tokens, fields["min_tokens"])
    if any(not text for text in stops):
        raise bad_request("stop cannot contain an empty string.")
    if any(not text for text in fields["bad_words"]):
        raise bad_request(f"bad_words cannot contain an empty string. Got bad_words={fields['bad_words']}")
    if n > 1 and number["temperature"] < TEMPERATURE_GREEDY:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    logprobs = fields["top_logprobs"] if "top_logprobs" in fields else fields["logprobs"]
    if logprobs is not None and logprobs > MAX_LOGPROBS:
        raise bad_request(
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {MAX_LOGPROBS}",
            "logprobs",
            logprobs,
        )
    seed = None if fields["seed"] == -1 else fields["seed"]
    stop_token_ids = tuple(dict.fromkeys(fields["stop_token_ids"] or ()))
    return Sampling(
        max_tokens=max_tokens,
        n=n,
        min_tokens=fields["min_tokens"],
        temperature=number["temperature"],
        seed=seed,
        stop=stops,
        stop_token_ids=stop_token_ids,
        ignore_eos=fields["ignore_eos"],
        include_stop=fields["include_stop_str_in_output"],
        skip_special_tokens=fields["skip_special_tokens"],
        rendered=_rendered(fields, number, n, seed, stops, stop_token_ids, max_tokens),
    )


def _check_ranges(n: int, number: Mapping[str, float], max_tokens: int, min_tokens: int) -> None:
    if n < 1:
        raise bad_request(f"n must be at least 1, got {n}.")
    if n > N_MAX:
        raise bad_request(
            f"n must be at most {N_MAX}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment "
            f"variable."
        )
    for key in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= number[key] <= 2.0:
            raise bad_request(f"{key} must be in [-2, 2], got {number[key]}.")
    if not math.isfinite(number["repetition_penalty"]):
        raise bad_request(f"repetition_penalty must be a finite number, got {number['repetition_penalty']}.")
    if number["repetition_penalty"] <= 0.0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {number['repetition_penalty']}.")
    temperature, top_p = number["temperature"], number["top_p"]
    if not math.isfinite(temperature):
        raise bad_request(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
    if temperature < 0.0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2.0:
        raise bad_request(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if not 0.0 < top_p <= 1.0:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if number["top_k"] < -1:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {number['top_k']}.")
    if not 0.0 <= number["min_p"] <= 1.0:
        raise bad_request(f"min_p must be in [0, 1], got {number['min_p']}.")
    if max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")


def _rendered(
    fields: Mapping[str, Any],
    number: Mapping[str, float],
    n: int,
    seed: int | None,
    stops: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    max_tokens: int,
) -> dict[str, Any]:
    """`sampling_params` of the render routes: keys at their default are left out, but for those set on every call."""
    shown: dict[str, Any] = {
        "n": n if n != 1 else None,
        "presence_penalty": number["presence_penalty"],
        "frequency_penalty": number["frequency_penalty"],
        "repetition_penalty": number["repetition_penalty"],
        "temperature": number["temperature"],
        "top_p": number["top_p"],
        "top_k": number["top_k"] or None,
        "min_p": number["min_p"],
        "seed": seed,
        "stop": list(stops),
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": fields["ignore_eos"] or None,
        "max_tokens": max_tokens,
        "min_tokens": fields["min_tokens"] or None,
        "logprobs": fields["logprobs"] if "top_logprobs" not in fields else None,
        "prompt_logprobs": fields["prompt_logprobs"],
        "skip_special_tokens": None if fields["skip_special_tokens"] else False,
        "include_stop_str_in_output": fields["include_stop_str_in_output"] or None,
        "output_kind": 1 if fields["stream"] else 2,
        "stream_interval": fields["stream_interval"],
        "skip_clone": True,
        "bad_words": list(fields["bad_words"]),
        "skip_reading_prefix_cache": fields["prompt_logprobs"] is not None,
    }
    return {key: value for key, value in shown.items() if value is not None}
