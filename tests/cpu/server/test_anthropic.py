"""Anthropic's API: the answers are the offline engine's."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from strandline import LLM, SamplingParams
from tests.cpu.server.process import TIMEOUT_S, ServerProcess

QUESTION: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "who is it?"}],
    "max_tokens": 20,
    "temperature": 0,
}
PROMPT = "s:be brief|u:who is it?|a:"


@pytest.fixture
def expected(twin: LLM) -> str:
    return twin.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0].text


def test_a_message_is_the_offline_answer_and_counts_cached_tokens_apart(server: ServerProcess, expected: str) -> None:
    server.post("/v1/messages", **QUESTION)
    answer = server.post("/v1/messages", **QUESTION).json()
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    counts = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": len(PROMPT)}
    assert answer["usage"] == {**counts, "output_tokens": 20}


def test_a_streamed_message_is_the_whole_one(server: ServerProcess, expected: str) -> None:
    with httpx.stream(
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
            client.messages.create(**{**question, "max_tokens": 0})
        with pytest.raises(anthropic.BadRequestError, match="tools is not served"):
            client.messages.create(**question, tools=[{"name": "f", "input_schema": {"type": "object"}}])
