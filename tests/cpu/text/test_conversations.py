"""Messages as clients send them, in templates that expect them otherwise."""

import inspect
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from strandline.errors import RequestError
from strandline.text.conversations import ChatRenderer
from tests.cpu.engine.tokenizers import byte_tokenizer

CALLS = (
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endif %}"
)
TEMPLATE = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}{{ m.role[0] + ':' }}"
    "{% if m.name is defined %}{{ m.name + ', ' }}{% endif %}{{ m.content }}" + CALLS + ";{% endfor %}"
)
"""Leaves out roles that it does not know, and takes a field that is there for one with a value."""
USER = {"role": "user", "content": "x"}


def rendered(*messages: dict[str, Any], template: str = TEMPLATE) -> str:
    return ChatRenderer(byte_tokenizer(), template).render(messages).text


def call(**more: Any) -> dict[str, Any]:
    function = {"name": "clock", **more}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    "more",
    [
        {"tool_calls": None},
        {"tool_calls": []},
        {"name": None, "refusal": None, "reasoning_content": None, "audio": None},
    ],
)
def test_null_and_empty_fields_are_left_out(more: dict[str, Any]) -> None:
    assert rendered(USER, {"role": "assistant", "content": "y", **more}) == "u:x;a:y;"


def test_null_content_is_an_empty_text() -> None:
    assert rendered(USER, {"role": "assistant", "content": None}, USER) == "u:x;a:;u:x;"


@pytest.mark.parametrize("more", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}, {"arguments": {}}])
def test_call_without_arguments_has_an_empty_object(more: dict[str, Any]) -> None:
    assert rendered(USER, call(**more)) == "u:x;a:<clock>;"


def test_message_without_content_and_calls_is_refused() -> None:
    for more in ({}, {"tool_calls": None}, {"tool_calls": []}):
        with pytest.raises(RequestError, match="must be a mapping with 'role' and 'content'"):
            rendered({"role": "assistant", **more})


def test_developers_message_is_a_system_prompt() -> None:
    rule = {"role": "developer", "content": "Be brief."}
    assert rendered(rule, USER) == "s:Be brief.;u:x;"
    assert rendered({"role": "system", "content": "Be kind."}, rule, USER) == "s:Be kind.\n\nBe brief.;u:x;"
    assert rendered(USER, rule, USER) == "u:x;s:Be brief.;u:x;"


def test_developers_message_stays_where_template_names_it() -> None:
    template = "{% for m in messages %}{{ '!' if m.role == 'developer' else '' }}{{ m.content }};{% endfor %}"
    rule = {"role": "developer", "content": "Be brief."}
    assert rendered(rule, rule, USER, template=template) == "!Be brief.;!Be brief.;x;"


def test_marks_of_joined_prompts_stay_at_their_ends() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    first = {"role": "system", "content": "A rule of some length.", **mark}
    second = {"role": "developer", "content": [{"type": "text", "text": "Another one.", **mark}]}
    tokenizer = byte_tokenizer()
    chat = ChatRenderer(tokenizer, TEMPLATE).render([first, second, USER])
    ends = [tokenizer.decode(chat.token_ids[:mark]) for mark in chat.marks]
    assert "s:A rule of some length." in ends
    assert "s:A rule of some length.\n\nAnother one." in ends


PLAIN = "{% for m in messages %}{{ m.role[0] + ':' + m.content }};{% endfor %}"


def test_calls_that_a_template_leaves_out_are_written() -> None:
    written = '<tool_calls>[{"name": "clock", "arguments": {"a": 1}}]</tool_calls>'
    asked = {**call(arguments='{"a": 1}'), "content": "So:"}
    in_ids = PLAIN.replace("m.content", "m.content + (m.tool_calls[0].id if m.tool_calls else '')")
    for template, wanted in (
        (PLAIN, f"u:x;a:So:{written};t:9;"),
        (TEMPLATE, "u:x;a:So:<clock a=1>;t:9;"),
        (in_ids, "u:x;a:So:a;t:9;"),
    ):
        renderer = ChatRenderer(byte_tokenizer(), template, tool_calls="jamba")
        assert renderer.render([USER, asked, {"role": "tool", "content": "9"}]).text == wanted
    marked = {**asked, "cache_control": {"type": "ephemeral"}}
    tokenizer = byte_tokenizer()
    chat = ChatRenderer(tokenizer, PLAIN, tool_calls="jamba").render([USER, marked, USER])
    assert f"u:x;a:So:{written}" in [tokenizer.decode(chat.token_ids[:mark]) for mark in chat.marks]


def test_template_may_take_a_single_call_per_message() -> None:
    single = TEMPLATE.replace("{% for c in m", "{% if m.tool_calls | length > 1 %}{{ 1 / 0 }}{% endif %}{% for c in m")
    none = "{% for m in messages %}{{ 1 / 0 if m.tool_calls else m.content }}{% endfor %}"
    for template, is_taken in ((TEMPLATE, True), (single, False), (PLAIN, True), (none, True)):
        assert ChatRenderer(byte_tokenizer(), template).takes_parallel_calls is is_taken


def test_variables_named_like_the_renderers_arguments_are_refused() -> None:
    renderer = ChatRenderer(byte_tokenizer(), "{{ documents[0].text }}{{ depth }}")
    options: dict[str, Any] = {"documents": [{"text": "a"}], "depth": 2}
    assert renderer.render([USER], template_options=options).text == "a2"
    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    for name in {*arguments, "messages"} - {"self", "kwargs", "documents"}:
        with pytest.raises(RequestError, match=f"chat_template_kwargs cannot set '{name}'"):
            renderer.render([USER], template_options={name: None})


@pytest.mark.parametrize(
    "tool",
    [
        {"function": {"parameters": {"type": "object"}, "name": "f", "strict": True, "return": {}, "description": "d"}},
        {
            "z": 1,
            "function": {
                "return": {},
                "strict": True,
                "description": "d",
                "parameters": {"type": "object"},
                "name": "f",
            },
            "y": 2,
            "type": "function",
        },
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    ],
)
def test_order_of_tool_keys_does_not_change_prompt(tool: dict[str, Any]) -> None:
    chat = ChatRenderer(byte_tokenizer(), "{{ (tools or []) | tojson }}{{ messages[0].content }}")
    shown = chat.render([USER], tools=[tool]).text
    expected = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}'
    more = ', "return": {}, "strict": true' if "strict" in tool["function"] else ""
    others = ', "y": 2, "z": 1' if "z" in tool else ""
    assert shown == f"{expected}{more}}}{others}}}]x"
