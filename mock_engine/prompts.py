"""What a request asks to be computed: its prompts as token ids, and how many tokens may follow.

Length checks come in the real server's order and words. Pure but for the tokenizer and the chat template, which are
handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mock_engine.chat import ChatTemplate, TemplateProblem
from mock_engine.errors import RequestError
from mock_engine.protocol import bad_request
from mock_engine.reply import Prompt
from mock_engine.tokenizer import Tokenizer

_MEDIA = {
    "image_url": "image", "image_pil": "image", "image_embeds": "image", "input_image": "image",
    "audio_url": "audio", "input_audio": "audio", "audio_embeds": "audio",
    "video_url": "video",
}  # fmt: skip
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def completion_prompts(fields: Mapping[str, Any], tokenizer: Tokenizer, max_model_len: int) -> list[Prompt]:
    prompt = fields["prompt"]
    if prompt == []:
        raise bad_request("You must pass at least one prompt", "prompt")
    _check_max_tokens(fields["max_tokens"], "max_tokens", max_model_len)
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    given = [prompt] if single else prompt
    made = []
    for entry in given:
        if isinstance(entry, str):
            ids = tokenizer.encode(entry, fields["add_special_tokens"])
            text = entry
        else:
            ids, text = entry, None
        ids = _bounded(ids, fields, max_model_len, text is not None)
        if text is None and fields["echo"] and not fields["return_token_ids"]:
            text = tokenizer.decode(ids)
        made.append(Prompt(ids, text, 1 if fields["n"] is None else fields["n"]))
    return made


def chat_prompt(fields: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate, max_model_len: int) -> Prompt:
    name = "max_tokens" if fields["max_completion_tokens"] is None else "max_completion_tokens"
    _check_max_tokens(fields[name], name, max_model_len)
    forwarded = (fields["kv_transfer_params"] or {}).get("prompt_token_ids")
    text = chat_text(fields, template)
    ids = forwarded if isinstance(forwarded, list) else tokenizer.encode(text, fields["add_special_tokens"])
    n = 1 if fields["n"] is None else fields["n"]
    return Prompt(_bounded(list(ids), fields, max_model_len, True), text, n)


def token_prompt(fields: Mapping[str, Any]) -> Prompt:
    """Ids as they are: a prompt that is too long is found by the engine, as in vLLM, and not before."""
    return Prompt(fields["token_ids"], None, fields["n"])


def chat_text(fields: Mapping[str, Any], template: ChatTemplate) -> str:
    """The conversation as the template writes it."""
    messages = fields["messages"]
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if fields["continue_final_message"] and fields["add_generation_prompt"]:
        raise bad_request(
            "continue_final_message and add_generation_prompt are not compatible. Set add_generation_prompt to false "
            "to continue the final message."
        )
    for message in messages:
        _check_parts(message.get("content"))
    options = {
        "add_generation_prompt": fields["add_generation_prompt"],
        "continue_final_message": fields["continue_final_message"],
        "tools": fields["tools"] if fields.get("tool_choice") != "none" else None,
        "documents": fields.get("documents"),
        **(fields["chat_template_kwargs"] or {}),
    }
    try:
        return template.render(messages, **options)
    except TemplateProblem as error:
        raise bad_request(str(error)) from error


def _check_parts(content: Any) -> None:
    """This replica reads text only; a part of another kind is refused as a text model refuses it."""
    if not isinstance(content, list):
        return
    for part in content:
        if isinstance(part, str):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None and isinstance(part, dict):
            kind = next((key for key in (*_TEXT_PARTS, *_MEDIA) if key in part), None)
        if kind in _MEDIA:
            raise bad_request(f"At most 0 {_MEDIA[kind]}(s) may be provided in one prompt.")
        if kind not in _TEXT_PARTS:
            raise bad_request(f"Unknown part type: {kind}")


def answer_tokens(fields: Mapping[str, Any], prompt: Prompt, max_model_len: int) -> int:
    """How many tokens the answer may have: what was asked, clamped to what the context leaves. May be below 1, which
    the sampling checks refuse."""
    asked = fields["max_tokens"]
    if fields.get("max_completion_tokens") is not None:
        asked = fields["max_completion_tokens"]
    left = max_model_len - len(prompt.ids)
    if "token_ids" in fields:
        left = max(1, left)  # the engine refuses a longer prompt
    if asked is None:
        return left
    if asked == 0 and fields["echo"] and "prompt" in fields:
        return min(1, left)
    return int(min(asked, left))


def check_ids(prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    """The engine's own checks, which a stream learns of only after its headers."""
    if not prompt.ids:
        raise bad_request("The decoder prompt cannot be empty")
    tokens = len(prompt.ids)
    if tokens > max_model_len:
        raise bad_request(
            f"The decoder prompt (length {tokens}) is longer than the maximum model length of {max_model_len}. "
            "Make sure that `max_model_len` is no smaller than the number of text tokens."
        )
    if tokens == max_model_len:
        raise bad_request(
            f"The decoder prompt (length {tokens}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {max_model_len}. Make sure that `max_model_len` is no smaller than the "
            "number of text tokens (prompt + requested output tokens)."
        )
    largest = max(prompt.ids)
    if largest >= vocab_size:
        raise bad_request(f"Token id {largest} is out of vocabulary")


def _check_max_tokens(asked: int | None, name: str, max_model_len: int) -> None:
    if asked is not None and asked > max_model_len:
        raise bad_request(
            f"{name}={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            name,
            asked,
        )


def _bounded(ids: list[int], fields: Mapping[str, Any], max_model_len: int, from_text: bool) -> list[int]:
    """The ids after truncation, if asked for, and never more than the context holds."""
    keep = fields["truncate_prompt_tokens"]
    if keep is not None:
        if keep > max_model_len:
            raise bad_request(
                f"truncate_prompt_tokens={keep} cannot be greater than max_model_len = {max_model_len}. "
                f"Please request a smaller truncation size.",
                "truncate_prompt_tokens",
                keep,
            )
        keep = max_model_len if keep == -1 else keep
        if len(ids) > keep:
            ids = ids[:keep] if fields["truncation_side"] == "right" else ids[len(ids) - keep :]
    if len(ids) > max_model_len:
        raise _too_long(len(ids), max_model_len, from_text)
    return ids


def _too_long(tokens: int, max_model_len: int, from_text: bool) -> RequestError:
    """A text is only tokenised until it is too long, so its exact length stays unknown."""
    told = max_model_len + 1 if from_text else tokens
    count = f"at least {told}" if from_text else str(told)
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {count} input "
        f"tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        f"prompt.",
        "input_tokens",
        told,
    )
