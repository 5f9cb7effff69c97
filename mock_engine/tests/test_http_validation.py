"""What is wrong with a request is said as a vLLM server says it: same types, places, words and order."""

from __future__ import annotations

from typing import Any

import pytest

from mock_engine import RequestError
from mock_engine.protocol import parse_chat, parse_completion, parse_either, read_json
from mock_engine.sampling import Sampling, check_logprobs, sampling
from mock_engine.schemas import TOKENIZE_CHAT, TOKENIZE_PROMPT
from mock_engine.validate import Bool, Float, Int, List, Problem, Str, Union


def refused(parse: Any, *given: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*given)
    return caught.value


def problems(kind: Any, value: Any) -> list[Problem]:
    found: list[Problem] = []
    kind.parse(value, ("body", "field"), found)
    return found


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        (Int(), "12", 12),
        (Int(), 3.0, 3),
        (Int(), True, 1),
        (Float(), "1.5", 1.5),
        (Float(), 2, 2.0),
        (Bool(), "yes", True),
        (Bool(), 0, False),
        (Union((List(Int()), List(Str()))), ["1", "2"], ["1", "2"]),
    ],
)
def test_lenient_values_are_converted_and_exact_branches_win(kind: Any, value: Any, parsed: Any) -> None:
    found: list[Problem] = []
    assert kind.parse(value, ("body",), found) == parsed
    assert not found


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (Int(), "x", "int_parsing"),
        (Int(), 1.5, "int_from_float"),
        (Int(), float("nan"), "finite_number"),
        (Int(), [], "int_type"),
        (Int(ge=1), 0, "greater_than_equal"),
        (Int(le=1), 2, "less_than_equal"),
        (Float(), "x", "float_parsing"),
        (Float(), None, "float_type"),
        (Bool(), "maybe", "bool_parsing"),
        (Bool(), 7, "bool_parsing"),
        (Bool(), {}, "bool_type"),
        (Str(), 5, "string_type"),
        (Str(min_length=1), "", "string_too_short"),
        (Str(max_length=1), "ab", "string_too_long"),
        (List(Int()), {}, "list_type"),
        (List(Int(), min_length=1), [], "too_short"),
        (List(Int(), max_length=1), [1, 2], "too_long"),
    ],
)
def test_each_fault_has_its_own_type(kind: Any, value: Any, complaint: str) -> None:
    assert [found["type"] for found in problems(kind, value)] == [complaint]


def test_a_union_complains_for_every_branch_in_order() -> None:
    found = problems(Union((List(Int(ge=0)), Str())), [5, -1])
    assert [(one["type"], one["loc"]) for one in found] == [
        ("greater_than_equal", ("body", "field", 1)),
        ("string_type", ("body", "field")),
    ]


def test_faults_are_listed_in_the_order_of_declaration_not_of_the_body() -> None:
    error = refused(parse_completion, {"prompt": "x", "n": "b", "max_tokens": "a", "temperature": []})
    assert error.message.startswith("3 validation errors:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens'")
    assert error.param == "body.max_tokens"
    assert error.type == "Bad Request"


def test_rules_over_several_fields_come_before_types() -> None:
    error = refused(parse_completion, {"prompt": "", "max_tokens": "abc"})
    assert (error.type, error.param) == ("BadRequestError", "prompt")


def test_a_long_list_of_faults_is_cut_and_counted() -> None:
    error = refused(parse_completion, {"prompt": [[-1] * 30]})
    assert "\n  ...and " in error.message
    assert error.message.count("\n") == 11


def test_an_error_never_echoes_a_long_value() -> None:
    error = refused(parse_completion, {"prompt": "x", "max_tokens": "9" * 3 + "x" * 5000})
    assert len(error.message) < 500
    assert "...[truncated]" in error.message


@pytest.mark.parametrize(
    ("raw", "content_type", "param"),
    [
        (b"{", "application/json", "body.1"),
        (b"", "application/json; charset=utf-8", "body"),
        (b"{}", "text/plain", None),
    ],
)
def test_bodies_that_are_no_json_are_bad_requests(raw: bytes, content_type: str, param: str | None) -> None:
    error = refused(lambda: parse_completion(read_json(raw, content_type)))
    assert (error.status, error.type, error.param) == (400, "Bad Request", param)


def test_json_beyond_the_standard_is_read_as_the_server_reads_it() -> None:
    assert read_json(b'{"a": NaN, "b": "\\ud800"}', "application/json")["b"] == "\ud800"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": "a@b"}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_completion_rules_name_their_parameter(fields: dict[str, Any], param: str) -> None:
    error = refused(parse_completion, {"prompt": "x", **fields})
    assert (error.status, error.type, error.param) == (400, "BadRequestError", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
    ],
)
def test_chat_rules_name_their_parameter(fields: dict[str, Any], param: str | None) -> None:
    error = refused(parse_chat, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert (error.status, error.type, error.param) == (400, "BadRequestError", param)


def test_a_message_of_an_unknown_role_is_accepted() -> None:
    assert parse_chat({"messages": [{"role": "robot", "content": "x"}]})["messages"][0]["role"] == "robot"


def test_a_message_that_is_no_object_is_refused_by_every_branch() -> None:
    error = refused(parse_chat, {"messages": ["hi"]})
    assert error.message.startswith("8 validation errors:\n  {'type': 'dict_type'")
    assert error.param == "body.messages.0.ChatCompletionDeveloperMessageParam"


def test_a_missing_content_is_only_missing_where_it_is_required() -> None:
    assert parse_chat({"messages": [{"role": "assistant"}]})
    error = refused(parse_chat, {"messages": [{"role": "user", "content": 5}]})
    assert "string_type" in error.message


def test_of_two_shapes_the_messages_win() -> None:
    shape, _ = parse_either(
        TOKENIZE_PROMPT, TOKENIZE_CHAT, {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}
    )
    assert shape is TOKENIZE_CHAT


def chosen(**fields: Any) -> Sampling:
    parsed = parse_completion({"prompt": "x", **fields})
    return sampling(parsed, parsed["max_tokens"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"max_tokens": 1, "min_tokens": 5}, "min_tokens must be less than or equal to max_tokens=1, got 5."),
        ({"stop": [""]}, "stop cannot contain an empty string."),
    ],
)
def test_sampling_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    assert refused(lambda: chosen(**fields)).message == message


@pytest.mark.parametrize(
    ("fields", "kind", "param", "wanted"),
    [
        ({"logprobs": 21}, "sample", "logprobs", 21),
        ({"logprobs": -1}, "sample", "logprobs", 32000),
        ({"prompt_logprobs": 21}, "prompt", "prompt_logprobs", 21),
        ({"prompt_logprobs": -1}, "prompt", "prompt_logprobs", 32000),
        ({"logprobs": 20, "prompt_logprobs": 20}, "", "", None),
    ],
)
def test_more_logprobs_than_served_are_refused_and_minus_one_means_all(
    fields: dict[str, Any], kind: str, param: str, wanted: int | None
) -> None:
    how = chosen(**fields)
    if wanted is None:
        check_logprobs(how, 32000)
        return
    error = refused(check_logprobs, how, 32000)
    said = f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: 20"
    assert (error.status, error.param, error.message) == (400, param, f"{said} (parameter={param}, value={wanted})")


def test_a_bias_is_for_token_ids() -> None:
    error = refused(lambda: chosen(logit_bias={"5": 1, "word": 2}))
    assert (error.param, "['word']" in error.message) == ("logit_bias", True)
    chosen(logit_bias={"5": 1})


@pytest.mark.parametrize("more", [{}, {"prompt": "x"}])
def test_embeddings_are_refused_as_by_a_server_without_them(more: dict[str, Any]) -> None:
    error = refused(parse_completion, {"prompt_embeds": "abc", **more})
    assert (error.status, error.param) == (400, "prompt_embeds")
    assert "--enable-prompt-embeds" in error.message


def test_greedy_sampling_puts_the_other_values_back_and_a_tiny_temperature_is_lifted() -> None:
    greedy = chosen(temperature=0, top_p=0.5, top_k=5, min_p=0.3).rendered
    assert (greedy["top_p"], greedy["min_p"], "top_k" in greedy) == (1.0, 0.0, False)
    assert chosen(temperature=0.001).temperature == 0.01


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt_too() -> None:
    assert chosen(echo=True, logprobs=2).prompt_logprobs == 2
    assert chosen(echo=True, logprobs=2).rendered["skip_reading_prefix_cache"] is True
    assert chosen(logprobs=2).prompt_logprobs is None


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"max_pattern_size": -1}, "must be >=0"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "min_pattern_size <= max_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be >= 2"),
    ],
)
def test_a_repetition_that_could_not_be_detected_is_refused(wanted: dict[str, int], word: str) -> None:
    assert word in refused(parse_completion, {"prompt": "x", "repetition_detection": wanted}).message
    parse_chat({"messages": [], "repetition_detection": {"max_pattern_size": 2, "min_count": 2}})


def test_defaults_of_a_completion() -> None:
    how = chosen()
    assert (how.max_tokens, how.n, how.stop, how.seed) == (16, 1, (), None)
    assert chosen(max_tokens=None).max_tokens == 16
    assert chosen(stop="a").stop == ("a",)
    assert chosen(seed=-1).seed is None


def test_json_nested_beyond_reason_is_the_clients_fault() -> None:
    deep = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert refused(read_json, deep, "application/json").status == 400
