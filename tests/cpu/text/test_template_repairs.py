"""Conversations that a template refuses are repaired, each turn as it was when it was the last one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.text.conversations import ChatRenderer
from strandline.text.model_files import STRICT_TEMPLATE
from tests.cpu.engine.tokenizers import byte_tokenizer

STRICT = STRICT_TEMPLATE.read_text()
ALTERNATING = (
    "{% set ns = namespace(last='assistant') %}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or m.role == ns.last %}{{ raise_exception('alternate!') }}{% endif %}"
    "{% if not m.content %}{{ raise_exception('empty!') }}{% endif %}"
    "{% set ns.last = m.role %}{{ '[' + m.role[0] + ':' + m.content + ']' }}{% endfor %}"
)
TO_THE_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ '[s:' + m.content + ']' }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.role[0] + ':' + m.content + ']' }}{% endfor %}"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ '[' + m.role[0] + ':' + m.content + ']' }}{% endif %}{% endfor %}"
)
TAKES_ALL = (
    "{% for m in messages %}{{ '[' + m.role[0] + ':' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<' + c.function.name + ' ' + c.function.arguments | string + '>' }}"
    "{% endfor %}{{ ']' }}{% endfor %}"
)
TEMPLATES = {
    "strict": STRICT,
    "alternating": ALTERNATING,
    "to the front": TO_THE_FRONT,
    "first only": FIRST_ONLY,
    "takes all": TAKES_ALL,
}


def rendered(template: str, *messages: dict[str, Any], answers: bool = False) -> str:
    return ChatRenderer(byte_tokenizer(), template).render(messages, add_generation_prompt=answers).text


def of(roles: str) -> list[dict[str, Any]]:
    """Return messages of the roles that letters name: ``s``, ``u``, ``a``, ``d``; ``c`` calls, ``t`` is a result."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    return [
        {"role": "assistant", "content": f"a{index}", "tool_calls": [call]}
        if letter == "c"
        else {"role": names[letter], "content": f"{letter}{index}"}
        for index, letter in enumerate(roles)
    ]


def shape(text: str) -> str:
    """Return a strict rendering with its tags shortened."""
    short = text.replace("<|im_start|>", "[").replace("<|im_end|>\n", "]").replace("\n", " ")
    return short.replace("system-reminder", "r").replace("<r> ", "<r>").replace(" </r>", "</r>")


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("ssu", "[system s0  s1][user u2]"),
        ("sdsu", "[system s0  d1  s2][user u3]"),
        ("us", "[user u0  <r>s1</r>]"),
        ("suds", "[system s0][user u1  <r>d2  s3</r>]"),
        ("suau", "[system s0][user u1][assistant a2][user u3]"),
        ("uasu", "[user u0][assistant a1][user <r>s2</r>  u3]"),
        ("uas", "[user u0][assistant a1][user <r>s2</r>]"),
        ("uasau", "[user u0][assistant a1][user <r>s2</r>][assistant a3][user u4]"),
        ("uss", "[user u0  <r>s1</r>  <r>s2</r>]"),
    ],
)
def test_later_system_messages_stay_where_they_are(roles: str, expected: str) -> None:
    assert shape(rendered(STRICT, *of(roles))) == expected


def test_system_message_after_a_result_does_not_end_the_question() -> None:
    thinking = {**of("c")[0], "reasoning_content": "hm"}
    text = shape(rendered(STRICT, *of("u"), thinking, *of("ts")))
    assert "<think> hm </think>" in text
    assert text.endswith("<tool_response> t0  <r>s1</r> </tool_response>]")


def test_nothing_changes_where_the_template_takes_it() -> None:
    assert rendered(TAKES_ALL, *of("ssuasuus")) == "[s:s0][s:s1][u:u2][a:a3][s:s4][u:u5][u:u6][s:s7]"


@pytest.mark.parametrize("template", [TO_THE_FRONT, FIRST_ONLY], ids=["to the front", "first only"])
def test_system_messages_that_a_template_moves_or_drops_stay(template: str) -> None:
    reminder = "<system-reminder>\ns2\n</system-reminder>"
    assert rendered(template, *of("suu")[:2], *of("suas")[3:]).startswith(
        f"[s:s0][u:u1\n\n{reminder.replace('2', '3')}"
    )


def test_roles_that_must_alternate_are_joined() -> None:
    assert rendered(ALTERNATING, *of("uuau")) == "[u:u0\n\nu1][a:a2][u:u3]"
    assert rendered(ALTERNATING, *of("uaau")) == "[u:u0][a:a1\n\na2][u:u3]"
    assert rendered(ALTERNATING, *of("su")) == "[u:s0\n\nu1]"
    assert rendered(ALTERNATING, *of("auu")) == "[u:(empty)][a:a0][u:u1\n\nu2]"
    assert rendered(ALTERNATING, {"role": "user", "content": ""}) == "[u:(empty)]"


def test_calls_and_results_that_a_template_refuses_are_written() -> None:
    text = rendered(ALTERNATING, *of("uct"), *of("a"))
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert text == f"[u:u0][a:a1{call}][u:<tool_response>\nt2\n</tool_response>][a:a0]"


def test_conversation_without_a_question_is_rendered() -> None:
    assert shape(rendered(STRICT, *of("s"))) == "[system s0][user (empty)]"
    assert shape(rendered(STRICT, *of("sct"))).startswith("[system s0][user (empty)][assistant a1")


BROKEN = [
    '{"path": "a',
    "[1]",
    '"x"',
    "{} {}",
    '{"a": 1,}',
    '{"a": "b\nc"}',
    "nonsense",
    "3",
    '{"x": NaN}',
    "[" * 99999,
]


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*of("u"), {"role": "assistant", "content": None, "tool_calls": [call]}, *of("t")]


@pytest.mark.parametrize("arguments", BROKEN, ids=range(len(BROKEN)))
def test_arguments_that_are_no_object_are_one_under_a_key(arguments: str) -> None:
    expected = rendered(STRICT, *called({"invalid_json": arguments}))
    assert rendered(STRICT, *called(arguments)) == expected
    assert f"<parameter=invalid_json>\n{arguments}\n</parameter>" in expected


def test_arguments_that_are_no_text_are_one_under_a_key() -> None:
    assert rendered(STRICT, *called([1])) == rendered(STRICT, *called("[1]"))


def test_text_arguments_stay_where_the_template_takes_them() -> None:
    assert '<f {"path": "a>' in rendered(TAKES_ALL, *called('{"path": "a'))


def test_calls_of_the_older_kind_are_calls() -> None:
    old = [
        *of("u"),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "t2"},
    ]
    assert shape(rendered(STRICT, *old)) == shape(rendered(STRICT, *called({"x": 1}))).replace("t0", "t2")


def test_reasoning_details_are_reasoning() -> None:
    details = [{"type": "reasoning.text", "text": "hm"}, {"type": "reasoning.encrypted", "data": "x"}]
    answers = (
        {"role": "assistant", "content": "b", **more} for more in ({"reasoning_details": details}, {"reasoning": "hm"})
    )
    first, second = (rendered(STRICT, *of("u"), answer) for answer in answers)
    assert first == second
    assert "<think>\nhm\n</think>" in first


def test_answer_of_reasoning_alone_is_rendered() -> None:
    for more in ({"reasoning": "hm"}, {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}):
        assert "<think>\nhm\n</think>" in rendered(STRICT, *of("u"), {"role": "assistant", **more})
    with pytest.raises(RequestError, match=r"messages\[1\]: a message must be"):
        rendered(STRICT, *of("u"), {"role": "assistant"})


def test_images_of_results_and_earlier_turns_are_notes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}, image]}
    assert "x\n[image left out: this model reads text only]" in rendered(STRICT, *of("uc"), result)
    question = {"role": "user", "content": [{"type": "text", "text": "y"}, image]}
    with pytest.raises(RequestError, match=r"messages\[0\]: this model does not read image_url parts; a message's"):
        rendered(STRICT, question)
    assert "y\n[image left out: this model reads text only]" in rendered(STRICT, question, *of("au"))
    assert "[image left out" in rendered(STRICT, question, *of("u"))
    with pytest.raises(RequestError, match="content parts must be"):
        rendered(STRICT, {"role": "user", "content": [{"type": "text", "text": 3}]}, *of("au"))


def test_marks_of_repaired_messages_stay_at_their_ends() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tokenizer = byte_tokenizer()
    first, *_, later = of("uaaas")
    messages = [{**first, "content": "A question of some length.", **mark}, {**later, **mark}, *of("uas")[1:]]
    chat = ChatRenderer(tokenizer, STRICT).render(messages)
    ends = [shape(tokenizer.decode(chat.token_ids[:end])) for end in chat.marks]
    assert "[user A question of some length." in ends
    assert "[user A question of some length.  <r>s4</r>]" not in ends  # bytes have no token that begins a turn
    assert "[user A question of some length.  <r>s4</r>" in ends


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(roles=st.text("suadt", min_size=1, max_size=9), turn=st.text("sdu", max_size=3))
def test_next_turn_extends_the_prompt_of_any_conversation(template: str, roles: str, turn: str) -> None:
    conversation = of(roles.replace("t", "ct") + "au" + turn + "a" + "u")
    cut = len(conversation) - 2
    renderer = ChatRenderer(byte_tokenizer(), template)
    before = renderer.render(conversation[:cut], add_generation_prompt=False).text
    whole = renderer.render(conversation, add_generation_prompt=False).text
    assert whole.startswith(before)
