"""Sessions with tools in channels: what the template makes of answers that come back, and what the next turn hits."""

import json
from typing import Any, Final

import pytest

from strandline.server.requests.output_parser import OutputParser
from strandline.text.channel_answers import end_of_call
from strandline.text.channels import ChannelParser
from strandline.text.conversations import ChatRenderer, RenderedChat
from strandline.text.remembered_answers import RememberedAnswers
from tests.cpu.text.channel_template import channel_tokenizer

TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
SYSTEM: Final = {"role": "system", "content": "Be brief. " * 20}
QUESTION: Final = {"role": "user", "content": "Does it rain in Rome, and in Oslo?"}
THOUGHT: Final = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant"
CALL: Final = (
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome","days":1.50}<|call|>'
)
FINAL: Final = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes, no.<|return|>"
PREAMBLE: Final = "<|channel|>commentary<|message|>A moment.<|end|><|start|>assistant"
ANSWERS: Final = {
    "call": THOUGHT + CALL,
    "call without a thought": CALL,
    "call with a preamble": THOUGHT + PREAMBLE + CALL,
    "preamble alone": PREAMBLE + CALL,
    "recipient first": ' to=functions.time<|channel|>commentary json<|message|>{"z": [1, 2]}<|call|>',
    "no arguments": "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>",
    "beyond ascii": THOUGHT + CALL.replace("Rome", "東京 é"),
    "escaped": THOUGHT + CALL.replace("Rome", "\\u00e9\\n"),
    "code": THOUGHT + CALL.replace("<|constrain|>json", "code"),
}


class Session:
    """A conversation whose client sends back what it got."""

    def __init__(self) -> None:
        tokenizer = channel_tokenizer()
        self.answers = RememberedAnswers(tokenizer, 2**20)
        self.renderer = ChatRenderer(tokenizer, answers=self.answers)
        self.messages: list[dict[str, Any]] = [SYSTEM, QUESTION]
        self.computed: list[int] = []

    def turn(self, answer: str) -> RenderedChat:
        """Answer the conversation; return the prompt."""
        chat = self.prompt()
        ids = self.renderer._tokenizer.encode(answer, add_special_tokens=False)
        assert chat.recollection is not None
        self.answers.add(chat.recollection.key, ids)
        self.computed = [*chat.token_ids, *ids]
        message = as_message(answer, len(self.messages))
        self.messages.append(message)
        for call in message.get("tool_calls", ()):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"rain": true}'})
        return chat

    def prompt(self) -> RenderedChat:
        return self.renderer.render(self.messages, tools=TOOLS)

    def num_hit(self, chat: RenderedChat) -> int:
        """Return how many tokens a prompt shares with the turn before."""
        pairs = enumerate(zip(self.computed, chat.token_ids, strict=False))
        return next((index for index, (one, other) in pairs if one != other), len(self.computed))


def as_message(answer: str, number: int = 0) -> dict[str, Any]:
    """Return an answer as the server's clients send it back."""
    parser = OutputParser(ChannelParser(takes_calls=True))
    parser.feed(answer)
    parser.finish()
    calls = [
        {"id": f"call_{number}_{index}", "type": "function", "function": {"name": x.name, "arguments": x.arguments}}
        for index, x in enumerate(parser.calls)
    ]
    message = {"role": "assistant", "content": parser.content or None, "reasoning_content": parser.reasoning or None}
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_turn_after_a_call_hits_all_of_it(answer: str) -> None:
    session = Session()
    for _ in range(3):
        session.turn(answer)
        chat = session.prompt()
        assert session.num_hit(chat) == len(session.computed)
        assert "<|call|><|start|>functions." in chat.text
    assert chat.recollection is not None
    assert chat.recollection.num_answers == 3


def test_next_question_hits_what_the_template_keeps() -> None:
    """Thoughts before a question's calls are dropped when the next question comes: the first call is rendered anew."""
    session = Session()
    first = session.turn(ANSWERS["call"])
    session.turn(FINAL)
    session.messages.append({"role": "user", "content": "And in Paris?"})
    chat = session.turn(ANSWERS["call"])
    shared = len(first.token_ids)
    assert chat.token_ids[:shared] == first.token_ids
    assert "I look it up" not in chat.text
    assert "<|channel|>final<|message|>Yes, no.<|end|>" in chat.text
    after = session.prompt()
    assert session.num_hit(after) == len(session.computed)
    assert after.text.count("I look it up") == 1


@pytest.mark.parametrize(
    "rendered",
    [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome", "days": 1.6}<|call|>',
        ' to=functions.time<|channel|>commentary json<|message|>{"city": "Rome", "days": 1.5}<|call|>',
        "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant" + CALL,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome", "days": 1.5}',
        THOUGHT + CALL,
    ],
)
def test_other_messages_are_not_the_answer(rendered: str) -> None:
    assert end_of_call(CALL.encode(), CALL.encode(), 0) == len(CALL)
    assert end_of_call(CALL.encode(), rendered.encode(), 0) is None


def test_deeply_nested_arguments_are_compared_as_text() -> None:
    deep = CALL.replace('{"city":"Rome","days":1.50}', 10_000 * "[" + 10_000 * "]")
    rendered = deep.replace("<|constrain|>", "").encode()
    assert end_of_call(deep.encode(), rendered, 0) == len(rendered)
    assert end_of_call(deep.encode(), rendered.replace(b"[]", b"[0]"), 0) is None


def test_calls_of_one_message_are_rendered_one_by_one() -> None:
    """The template renders the first call of a message, and names a result after the last call."""
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": json.dumps({"n": index})}}
        for index, name in enumerate(("weather", "time"))
    ]
    results = [{"role": "tool", "tool_call_id": f"c{index}", "content": f"r{index}"} for index in (1, 0)]
    answer = {"role": "assistant", "content": None, "reasoning_content": "Both.", "tool_calls": calls}
    text = Session().renderer.render([QUESTION, answer, *results], tools=TOOLS).text
    _, after = text.split("Oslo?<|end|>")
    assert after == (
        '<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions.time to=assistant<|channel|>commentary<|message|>"r1"<|end|>'
        "<|start|>assistant<|channel|>analysis<|message|>Both.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"n": 0}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"r0"<|end|><|start|>assistant'
    )
