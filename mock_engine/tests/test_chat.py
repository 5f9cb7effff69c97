"""Chat templates: ours, a model's, and a hostile one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_engine import ConfigError
from mock_engine.chat import DEFAULT_TEMPLATE, ChatTemplate, TemplateProblem, load_template, text_of

MODEL_TEMPLATE = Path(__file__).parent / "http" / "model" / "chat_template.jinja"


def test_the_default_template_marks_each_role_with_one_token() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "robot", "content": "beep"}]
    text = ChatTemplate(DEFAULT_TEMPLATE).render(messages, add_generation_prompt=True)
    assert text == "<|user|>hi<|end|><|im_start|>robot<|sep|>beep<|end|><|assistant|>"


def test_a_final_message_that_is_continued_stays_open() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    text = ChatTemplate(DEFAULT_TEMPLATE).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>hi<|end|><|assistant|>well"


def test_content_parts_are_joined_by_newlines() -> None:
    assert text_of([{"type": "text", "text": "hello"}, "there"]) == "hello\nthere"
    assert text_of(None) == ""


def test_a_model_template_renders_as_the_model_expects() -> None:
    template = load_template(str(MODEL_TEMPLATE), None)
    text = template.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_loops_over_parts_gets_the_parts() -> None:
    template = ChatTemplate("{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}")
    assert template.render([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == "[a]"


def test_a_template_can_refuse_a_conversation() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateProblem, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_python() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__ }}")
    with pytest.raises(TemplateProblem):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse_is_a_start_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% for %}")


def test_a_template_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jinja"):
        load_template(str(tmp_path / "nothing.jinja"), None)
