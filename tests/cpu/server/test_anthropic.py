"""Anthropic's API: the answers are the offline engine's."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from strandline import LLM, SamplingParams
from strandline.server.messages.blocks import Blocks
from strandline.text.segments import Segment, SegmentKind
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_stream

QUESTION: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "who is it?"}],
    "max_tokens": 20,
    "temperature": 0,
}
PROMPT = "s:be brief|u:who is it?|a:"


@pytest.fixture
def expected(offline_llm: LLM) -> str:
    return offline_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0].text


def test_message_equals_offline_answer_and_counts_cached_tokens(server: ServerProcess, expected: str) -> None:
    server.post("/v1/messages", **QUESTION)
    answer = server.post("/v1/messages", **QUESTION).json()
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    counts = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": len(PROMPT)}
    assert answer["usage"] == {**counts, "output_tokens": 20}


@pytest.mark.parametrize("stream", [False, True])
def test_message_has_the_account_of_its_lookup(server: ServerProcess, stream: bool) -> None:
    body = {**QUESTION, "cache_salt": f"account {stream}", "include_cache_account": True, "stream": stream}
    for expected in (0, len(PROMPT)):
        text = server.post("/v1/messages", **body).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("{", "data: "))]
        [*_, usage] = [each["usage"] for each in map(json.loads, lines) if "usage" in each]
        account = usage["cache"]
        assert account["queried"] == len(PROMPT)
        assert account["hit"] == usage["cache_read_input_tokens"] == expected
        assert sum(miss["tokens"] for miss in account["misses"]) == usage["input_tokens"]


def test_models_have_the_fields_of_anthropics_api(server: ServerProcess) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        page = client.models.list()
        [model] = list(page)
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at.timestamp() > 0
    assert (model.lifecycle, model.max_input_tokens) == ("active", 4095)
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")


def test_a_streamed_message_is_the_whole_one(server: ServerProcess, expected: str) -> None:
    with http_stream(
        "POST", f"{server.url}/v1/messages", json={**QUESTION, "stream": True}, timeout=TIMEOUT_S
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [body["type"] for body in bodies]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(body["delta"]["text"] for body in bodies[2:-3]) == expected
    assert bodies[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_stop_sequence_ends_a_message_and_is_named(server: ServerProcess, expected: str) -> None:
    stop = expected[5:8]
    answer = server.post("/v1/messages", **QUESTION, stop_sequences=[stop]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == expected[: expected.index(stop)]


@pytest.mark.parametrize("field", ["max_tokens", "messages"])
def test_what_is_missing_is_a_400(server: ServerProcess, field: str) -> None:
    answer = server.post("/v1/messages", **{name: value for name, value in QUESTION.items() if name != field})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_anthropics_own_package_reads_answers_and_streams(server: ServerProcess, expected: str) -> None:
    question = {name: value for name, value in QUESTION.items() if name != "temperature"}
    question["extra_body"] = {"temperature": 0}  # the package no longer knows it
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**question)
        assert [block.text for block in answer.content if block.type == "text"] == [expected]
        with client.messages.stream(**question) as stream:
            assert "".join(stream.text_stream) == expected
            assert stream.get_final_message().usage.output_tokens == 20
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be"):
            client.messages.create(**{**question, "max_tokens": -1})
        with pytest.raises(anthropic.BadRequestError, match="does not support tools"):
            client.messages.create(**question, tools=[{"name": "f", "input_schema": {"type": "object"}}])


# Tools and reasoning, from random models that are bound to say things.

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says what the weather will be.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = (
    '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)


@pytest.fixture
def client(json_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=json_server.url, api_key="none", max_retries=0) as client:
        yield client


def saying(text: str, **more: Any) -> dict[str, Any]:
    """Return a question to which the answer is bound to be a text."""
    body = {"structured_outputs": {"choice": [text]}}
    wishes: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "tools": [WEATHER], "extra_body": body}
    return {**wishes, "messages": [{"role": "user", "content": "Will it rain?"}], **more}


def dumped(blocks: Any) -> list[Any]:
    return [
        {key: value for key, value in block.model_dump().items() if value is not None and key != "id"}
        for block in blocks
    ]


def test_reasoning_text_and_calls_are_blocks_whole_and_streamed(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**saying(CALL))
    thinking, text, call = dumped(answer.content)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Ulm"})
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(**saying(CALL)) as stream:
        final = stream.get_final_message()
    assert dumped(final.content) == dumped(answer.content)
    assert final.stop_reason == "tool_use"


def test_calls_and_results_come_back_as_a_conversation_that_hits(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**saying(CALL))
    call = answer.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
    history = [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
    ]
    again = client.messages.create(**saying("It will.", messages=history))
    assert dumped(again.content) == [{"type": "text", "text": "It will."}]
    assert (again.usage.cache_read_input_tokens or 0) >= answer.usage.input_tokens
    count = client.messages.count_tokens(model="tiny", messages=history, tools=[WEATHER])  # type: ignore[arg-type]
    total = again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
    assert count.input_tokens == total


def test_answer_follows_output_format(client: anthropic.Anthropic) -> None:
    body = {"output_format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    [block] = client.messages.create(**saying("", extra_body=body, tools=[])).content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in ("Ulm", "Bonn")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_be_made_is_made(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    wishes = saying("", tool_choice={**choice, "disable_parallel_tool_use": True}, extra_body={})
    [call] = client.messages.create(**wishes).content
    assert call.type == "tool_use"
    assert call.input in ({"city": "Ulm"}, {"city": "Bonn"})


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        r"messages\.0\.content\.0\.image: this model reads text only",
    ),
    ({"system": "s", "messages": [{"role": "bogus", "content": "x"}]}, r"messages\.0: a message's role must be one of"),
    ({"messages": [{"role": "user"}]}, r"messages\.0: a message must be"),
    (
        {"system": "Be brief.", "messages": [{"role": "user", "content": 3}]},
        r"messages\.0: a message's content must be",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "s"}], "tool_choice": {"type": "tool", "name": "s"}},
        "runs on Anthropic's servers",
    ),
    ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "runs on Anthropic's servers"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
    ({"tool_choice": {"type": "sometimes"}}, "of type auto, any, tool or none"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "not among the tools"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": 3}]}]},
        "tool_result",
    ),
]


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_what_is_malformed_is_refused(client: anthropic.Anthropic, more: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message):
        client.messages.create(**saying("x", **more))


@pytest.mark.parametrize("written", ["{oh", '{"x": NaN}', '{"x": -1e999}', '{"x": "\\ud800"}', "[1]"])
def test_arguments_that_are_not_json_are_kept(written: str) -> None:
    blocks = Blocks()
    blocks.append([Segment(SegmentKind.CALL, "f"), Segment(SegmentKind.ARGUMENTS, written)])
    blocks.finish()
    assert blocks.blocks[0]["input"] == {"invalid_json": written}
