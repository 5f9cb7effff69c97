"""Renders a conversation into the text that is tokenised, with the model's own jinja template or our default one.

The default marks each turn with one reserved token a role, so that a conversation that grows keeps the ids of its
earlier turns. Templates come from users: they run in jinja's sandbox and can read nothing but what is handed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from mock_engine.errors import ConfigError

DEFAULT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] in ['system', 'developer', 'user', 'assistant', 'tool'] -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- else -%}{{ '<|im_start|>' + message['role'] + '<|sep|>' }}{%- endif -%}"
    "{{ message['content'] }}"
    "{%- if not (loop.last and continue_final_message) -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


class TemplateProblem(Exception):
    """A template could not be rendered for these messages: the client's error, told in its answer."""


class ChatTemplate:
    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not parse at line {error.lineno}: {error.message}; "
                f"give a jinja template as models ship it, with --chat-template"
            ) from error
        self._takes_parts = _reads_content_parts(environment.parse(source))

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """`options` are the template's variables: add_generation_prompt, tools, chat_template_kwargs."""
        shown = [_parted(message) if self._takes_parts else _flat(message) for message in messages]
        try:
            return self._template.render(messages=shown, **{"bos_token": "", "eos_token": "", **options})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateProblem(str(error)) from error


def load_template(path: str | None, from_tokenizer: str | None) -> ChatTemplate:
    """The user's file if named, else the template that came with the tokenizer, else the default."""
    if path is None:
        return ChatTemplate(from_tokenizer or DEFAULT_TEMPLATE)
    if "{%" in path or "{{" in path:
        return ChatTemplate(path)
    try:
        return ChatTemplate(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}; name a readable jinja file") from error


def _reads_content_parts(tree: jinja2.nodes.Template) -> bool:
    """True if the template loops over a message's content itself, as templates of multimodal models do."""
    for loop in tree.find_all(jinja2.nodes.For):
        over = loop.iter
        if isinstance(over, jinja2.nodes.Getattr) and over.attr == "content":
            return True
        if isinstance(over, jinja2.nodes.Getitem):
            key = over.arg
            if isinstance(key, jinja2.nodes.Const) and key.value == "content":
                return True
    return False


def text_of(content: Any) -> str:
    """Content as one text: parts are joined by newlines, as the real server joins them."""
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": text_of(message.get("content"))}


def _parted(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; for serving it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)
