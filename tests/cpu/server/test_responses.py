"""The Responses API by OpenAI's own client: items, streams, tools, structured outputs, refusals."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from strandline import LLM, SamplingParams
from strandline.records.events import StepEvents, TokenEvent
from strandline.records.messages import Stepped
from tests.cpu.server.process import TIMEOUT_S, ServerProcess
from tests.cpu.server.test_queue import held_server

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
LOGPROBS: Any = "message.output_text.logprobs"
CALL = '<think>\nhm\n</think>\n\nSee.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture
def chatty(json_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{json_server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def saying(said: str, **more: Any) -> dict[str, Any]:
    """Return a question to which the answer is bound to be a text."""
    wishes: dict[str, Any] = {"model": "tiny", "input": "Will it rain?", "tools": [WEATHER], "max_output_tokens": 300}
    return {**wishes, "extra_body": {"structured_outputs": {"choice": [said]}}, **more}


def test_a_response_is_the_offline_answer_and_counts_cached_tokens(client: openai.OpenAI, offline_llm: LLM) -> None:
    prompt = "s:be brief|u:who is it?|a:"
    params = SamplingParams(temperature=0, max_tokens=9)
    expected = offline_llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    wishes: dict[str, Any] = {"model": "tiny", "instructions": "be brief", "input": "who is it?", "temperature": 0}
    for _ in range(2):
        answer = client.responses.create(**wishes, max_output_tokens=9)
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 9)
    assert answer.usage.input_tokens_details.cached_tokens == len(prompt)


def test_responses_logprobs_are_those_of_chat_completions(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"model": "tiny", "temperature": 0, "top_logprobs": 2}
    chat = client.chat.completions.create(
        **wishes, messages=[{"role": "user", "content": "who?"}], max_tokens=9, logprobs=True
    )
    assert chat.choices[0].logprobs is not None
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content or ()]
    wishes |= {"input": "who?", "max_output_tokens": 9, "include": [LOGPROBS]}
    whole = client.responses.create(**wishes)
    *_, last = events = list(client.responses.create(**wishes, stream=True))
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        [part] = response.output[0].content  # type: ignore[union-attr]
        assert [entry.model_dump() for entry in part.logprobs or ()] == expected  # type: ignore[union-attr]
        assert len(expected[0]["top_logprobs"]) == 2
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.logprob for event in deltas for entry in event.logprobs] == [entry["logprob"] for entry in expected]


def test_tokens_are_chosen_as_for_chat_completions(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"seed": 5, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True}
    more |= {"frequency_penalty": 0.2, "logit_bias": {"7": -100}}
    wishes: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "top_p": 0.95}

    def answer(**options: Any) -> str:
        response = client.responses.create(**wishes, input="who?", max_output_tokens=16, extra_body={**more, **options})
        return response.output_text

    chat = client.chat.completions.create(
        **wishes, messages=[{"role": "user", "content": "who?"}], max_tokens=16, extra_body=more
    )
    text = answer()
    assert text == chat.choices[0].message.content
    assert answer(seed=6) != text
    assert answer(stop=[text[4:7]]) == text[: text.index(text[4:7])]


@pytest.mark.parametrize("value", ["reasoning.encrypted_content", "file_search_call.results"])
def test_results_that_no_response_has_may_be_included(client: openai.OpenAI, value: Any) -> None:
    assert client.responses.create(model="tiny", input="who?", max_output_tokens=3, include=[value]).output_text


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs include"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "logprobs must be"),
    ],
)
def test_logprobs_that_are_not_served_are_refused(chatty: openai.OpenAI, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chatty.responses.create(model="tiny", input="who?", max_output_tokens=9, **wishes)


def test_logprobs_beside_reasoning_and_calls_are_those_of_the_message(chatty: openai.OpenAI) -> None:
    said = CALL.replace("See.", "Moment, \N{SUN BEHIND CLOUD}.")
    wishes = saying(said, include=[LOGPROBS], top_logprobs=2)
    whole = chatty.responses.create(**wishes)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    [part] = whole.output[1].content  # type: ignore[union-attr]
    entries = part.logprobs or []  # type: ignore[union-attr]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == whole.output_text
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    *_, last = events = list(chatty.responses.create(stream=True, **wishes))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    for streamed in ([each for event in deltas for each in event.logprobs], done.logprobs):
        assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in entries], abs=1e-4)
    assert last.type == "response.completed"
    replayed = chatty.responses.create(model="tiny", input=last.response.output, max_output_tokens=1)  # type: ignore[arg-type]
    assert replayed.usage is not None


def test_a_streamed_response_is_the_whole_one(chatty: openai.OpenAI) -> None:
    whole = chatty.responses.create(**saying(CALL))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "See."
    assert whole.status == "completed"
    events = list(chatty.responses.create(stream=True, **saying(CALL)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (thought, text, json.loads(arguments)) == ("hm", "See.", {"city": "Ulm"})
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "See."
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens


def test_openais_own_reader_of_streams_puts_the_response_together(chatty: openai.OpenAI) -> None:
    with chatty.responses.stream(**saying(CALL)) as stream:
        final = stream.get_final_response()
    [call] = [item for item in final.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Ulm"}


def test_items_of_an_answer_come_back_as_the_conversation(chatty: openai.OpenAI) -> None:
    first = chatty.responses.create(**saying(CALL))
    call = first.output[-1]
    assert call.type == "function_call"
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Will it rain?"}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
    again = chatty.responses.create(**saying("Yes.", input=history))
    assert again.output_text == "Yes."
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_text_formats_and_required_calls_are_followed(chatty: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"]}}
    answer = chatty.responses.create(**saying("", extra_body={}, text=text, tools=[]))
    assert json.loads(answer.output_text)["city"] in ("Ulm", "Bonn")
    for choice in ("required", {"type": "function", "name": "weather"}):
        wishes = saying("", extra_body={}, tool_choice=choice, parallel_tool_calls=False)
        [call] = chatty.responses.create(**wishes).output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Ulm", "Bonn")


def test_the_last_configuration_update_counts_and_is_not_rendered(server: ServerProcess) -> None:
    schemas = [{"type": "json_schema", "name": "s", "schema": {"enum": [text]}} for text in ("a", "b")]
    updates = [{"type": "configuration_update", "text": {"format": schema}} for schema in schemas]
    effort = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    question = {"role": "user", "content": "which?"}
    limits: dict[str, Any] = {"max_output_tokens": 9, "stop_token_ids": [0]}
    wishes: dict[str, Any] = {"text": {"format": schemas[0], "verbosity": "low"}, **limits}
    plain = server.post("/v1/responses", input=[question], **wishes).json()
    answer = server.post("/v1/responses", input=[*updates, effort, question], **wishes).json()
    assert [each["output"][0]["content"][0]["text"][:3] for each in (plain, answer)] == ['"a"', '"b"']
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert answer["reasoning"]["effort"] == "low"
    assert answer["text"] == {"format": schemas[1], "verbosity": "low"}
    # A stored update stays in effect.
    later = server.post("/v1/responses", input=[question], previous_response_id=answer["id"], **limits).json()
    assert later["output"][0]["content"][0]["text"][:3] == '"b"'
    wrong = server.post("/v1/responses", input=[effort | {"reasoning": "low"}, question])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input[0].reasoning")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found"),
    ({"input": [{"text": "x"}]}, r"input\[0\] must be an item with a type"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [5]}]}, r"input\[1\].content\[0\] must"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, r"input\[0\]: no item .msg_1. is stored"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].name must be a text"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "does not run"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "a tool of type 'web_search'"),
    ({"include": ["everything"]}, "include must be among message.output_text.logprobs, .*; got 'everything'"),
    ({"extra_body": {"n": 2}}, "n must be 1 for /v1/responses, got 2"),
    ({"extra_body": {"seed": "5"}}, "seed"),
    ({"extra_body": {"top_k": -7}}, "top_k must be"),
]


@pytest.mark.parametrize(("more", "message"), WRONG)
def test_what_is_not_served_is_refused(chatty: openai.OpenAI, more: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chatty.responses.create(**saying("x", **more))


def test_a_stream_that_fails_ends_with_the_failed_response(server: ServerProcess) -> None:
    wishes = {"input": "x", "min_tokens": 2, "stop_token_ids": list(range(256)), "stream": True}
    lines = server.post("/v1/responses", max_output_tokens=4, **wishes).text.splitlines()
    *_, failed, error = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "no_token"
    assert failed["response"]["error"]["message"] == error["error"]["message"]


def test_input_tokens_are_those_of_the_response(chatty: openai.OpenAI) -> None:
    first = chatty.responses.create(model="tiny", input="who is it?", max_output_tokens=3)
    wishes: dict[str, Any] = {"model": "tiny", "instructions": "be brief", "input": "and now?", "tools": [WEATHER]}
    wishes["previous_response_id"] = first.id
    counted = chatty.responses.input_tokens.count(**wishes)
    second = chatty.responses.create(**wishes, max_output_tokens=1)
    assert second.usage is not None
    assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": second.usage.input_tokens}


def test_operation_that_is_not_served_has_no_path(chatty: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/responses/compact: conversations are not compacted"):
        chatty.responses.compact(model="tiny", input="hi")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_aborted_response_is_incomplete(is_streamed: bool) -> None:
    async def ask() -> httpx.Response:
        async with held_server() as server:
            server.may_go.set()
            asked = asyncio.ensure_future(server.post("/v1/responses", {"input": "x", "stream": is_streamed}))
            [submission] = (await server.core.submitted.get()).submissions
            event = TokenEvent(submission.new.request_id, 5, None, None, None, None)
            server.core.say(Stepped(StepEvents([event])))
            while not any(stream.num_output_tokens for stream in server.client.frontend.requests.values()):
                await asyncio.sleep(0)
            assert server.client.abort() == 1
            return await asked

    answer = asyncio.run(ask())
    last = answer.text.rpartition("data: ")[2] if is_streamed else answer.text
    event: dict[str, Any] = json.loads(last)
    assert event.get("type", "response.incomplete") == "response.incomplete"
    response = event.get("response", event)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "abort"})
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert response["completed_at"] is None
