"""Messages that the output continues: the prompt ends with their content, whatever the template writes around it."""

from typing import Any

import pytest

from strandline.errors import RequestError
from strandline.server.requests.output_parser import OutputFormat
from strandline.text.conversations import ChatRenderer
from strandline.text.model_files import STRICT_TEMPLATE
from strandline.text.reasoning import ThinkParser
from strandline.text.segments import merge_segments
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.text.templates import FAMILIES

STRICT = STRICT_TEMPLATE.read_text()
THINKS = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content | trim + '[end]' }}"
    "{% endfor %}{{ '[assistant]<think>\\n' if add_generation_prompt else '' }}"
)
"""Writes reasoning before the last answer, strips contents, and opens the reasoning of the next one."""
USER = {"role": "user", "content": "x"}


def continued(template: str, *messages: dict[str, Any]) -> str:
    return ChatRenderer(byte_tokenizer(), template).render(messages, continue_final_message=True).text


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", "Line.\n", " x", "a</think>b"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_ends_with_the_content(name: str, content: str) -> None:
    family = FAMILIES[name]
    renderer = ChatRenderer(family.tokenizer(), family.template)
    chat = renderer.render([USER, answer(content)], continue_final_message=True)
    assert chat.continued == content
    assert chat.text.endswith(content.lstrip())
    next_turn = renderer.render([USER, answer(content + "y"), USER]).text
    assert next_turn.startswith(chat.text) or "</think>" in content or content != content.strip()


def test_reasoning_before_the_answer_is_closed() -> None:
    assert continued(THINKS, USER, answer("So")) == "[user]x[end][assistant]<think>\n\n</think>\n\nSo"
    assert continued(THINKS, USER, answer("So", reasoning="hm")).endswith("<think>\nhm\n</think>\n\nSo")


@pytest.mark.parametrize(
    "message", [answer("<think>\nI w"), answer("", reasoning_content="I w"), answer(None, reasoning="I w")]
)
def test_open_reasoning_is_continued(message: dict[str, Any]) -> None:
    assert continued(THINKS, USER, message) == "[user]x[end][assistant]<think>\nI w"
    assert continued(STRICT, USER, message).endswith("<|im_start|>assistant\n<think>\nI w")


def test_answer_with_its_reasoning_is_what_was_generated() -> None:
    assert continued(THINKS, USER, answer("<think>\nhm\n</think>\n\nSo")).endswith(
        "[assistant]<think>\nhm\n</think>\n\nSo"
    )


def test_empty_message_is_an_answer_from_the_beginning() -> None:
    renderer = ChatRenderer(byte_tokenizer(), THINKS)
    for content in ("", None, " "):
        assert renderer.render([USER, answer(content)], continue_final_message=True) == renderer.render([USER])


def test_question_is_continued_too() -> None:
    assert continued(STRICT, {"role": "user", "content": "What is"}).endswith("<|im_start|>user\nWhat is")


def test_message_with_calls_cannot_be_continued() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(RequestError, match="a message with tool calls cannot be continued"):
        continued(STRICT, USER, answer("x", tool_calls=[call]))
    with pytest.raises(RequestError, match="the conversation is empty"):
        continued(STRICT)


@pytest.mark.parametrize(
    ("beginning", "text", "expected"),
    [
        ("So", " it is", [("content", " it is")]),
        ("So", "<think>", [("content", "<think>")]),
        ("<think>\nI w", " as\n</think>\n\nSo", [("reasoning", " as"), ("content", "So")]),
        ("<think>\nI was\n</think>\n\nSo", " it is", [("content", " it is")]),
    ],
)
def test_parser_goes_on_where_the_beginning_ends(beginning: str, text: str, expected: list[tuple[str, str]]) -> None:
    rules = OutputFormat("none", "qwen3").reasoning_rules("<think>", with_tools=False, continued=beginning)
    assert rules is not None
    parser = ThinkParser.of(rules)
    segments = merge_segments([*[s for char in text for s in parser.feed(char)], *parser.finish()])
    assert [(segment.kind.value, segment.text) for segment in segments] == expected
