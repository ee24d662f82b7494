"""``diagnostics`` of Anthropic's API and OpenAI's ``prompt_cache_diagnostics``: where prompts differ."""

import json
from typing import Any

import anthropic
import pytest

from strandline.server.messages.diagnostics import Diagnosis
from strandline.server.requests.rendered import Rendered
from strandline.server.requests.response_store import ResponseStore
from strandline.server.responses.diagnostics import Comparison
from tests.cpu.server.process import TIMEOUT_S, ServerProcess

BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0, "system": "be brief"}
TOOL = {"type": "function", "function": {"name": "f"}}
QUESTION = {"role": "user", "content": "who is it, and why?"}
MARKED = {"type": "text", "text": "who is it, and why?", "cache_control": {"type": "ephemeral"}}
LATER = {"role": "user", "content": "so?"}
UNASKED = {"role": "user", "content": "and before?"}
"""Asked by one test: what others asked may be cached further than the first request was long."""
EFFORT = {"type": "configuration_update", "reasoning": {"effort": "low"}}
RESPONSE: dict[str, Any] = {"max_output_tokens": 3, "temperature": 0, "instructions": "be brief"}


def rendered(**changed: Any) -> Rendered:
    given = {"model": "m", "tools": [], "messages": [QUESTION], "pictures": (), "settings": {}}
    return Rendered(**(given | changed))


def send(server: ServerProcess, previous_id: str | None, **changed: Any) -> dict[str, Any]:
    body = BODY | {"messages": [QUESTION], "diagnostics": {"previous_message_id": previous_id}} | changed
    answer: dict[str, Any] = server.post("/v1/messages", **body).json()
    return answer


@pytest.fixture(scope="module")
def first(server: ServerProcess) -> dict[str, Any]:
    return send(server, None)


def test_a_continued_conversation_has_no_reason(server: ServerProcess, first: dict[str, Any]) -> None:
    assert first["diagnostics"] is None
    answer = {"role": "assistant", "content": first["content"]}
    for question in (QUESTION, {"role": "user", "content": [MARKED]}):
        assert send(server, first["id"], messages=[question, answer, LATER])["diagnostics"] is None
    assert "diagnostics" not in server.post("/v1/messages", **BODY, messages=[QUESTION]).json()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"system": "be brief!", "messages": [LATER]}, "system_changed"),
        ({"messages": [UNASKED, QUESTION]}, "messages_changed"),
        ({"messages": [LATER], "thinking": {"type": "disabled"}}, "unavailable"),
        ({"messages": [LATER], "cache_salt": "other"}, "unavailable"),
    ],
)
def test_the_first_difference_is_the_reason(
    server: ServerProcess, first: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    answer = send(server, first["id"], **changed)
    found = answer["diagnostics"]["cache_miss_reason"]
    assert found["type"] == reason
    if reason != "unavailable":
        num_tokens = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
        assert found["cache_missed_input_tokens"] == num_tokens - answer["usage"]["cache_read_input_tokens"]


def test_unknown_earlier_responses_are_named_and_malformed_ids_refused(server: ServerProcess) -> None:
    unknown = send(server, "msg_0")["diagnostics"]
    assert unknown == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    response = server.post("/v1/messages", **BODY, messages=[QUESTION], diagnostics={"previous_message_id": 5})
    assert response.status_code == 400
    assert "diagnostics.previous_message_id" in response.json()["error"]["message"]


def test_anthropics_package_reads_the_reason_from_a_stream(server: ServerProcess, first: dict[str, Any]) -> None:
    asked = BODY | {"messages": [LATER], "diagnostics": {"previous_message_id": first["id"]}}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client,
        client.messages.stream(**{k: v for k, v in asked.items() if k != "temperature"}) as stream,
    ):
        found = stream.get_final_message().diagnostics
    assert found is not None
    assert found.cache_miss_reason is not None
    assert found.cache_miss_reason.type == "messages_changed"


def test_pictures_tools_and_models_are_compared() -> None:
    store = ResponseStore(1 << 20)
    shown = [{"role": "user", "content": "\U0010fffe0\U0010ffff what is it?"}]
    Diagnosis(store, "o", rendered(messages=shown, pictures=["one"])).keep("a", 9)
    same = Diagnosis(store, "o", rendered(messages=shown, pictures=["one"]), "a")
    assert same.result(0) == {"diagnostics": None}
    other = Diagnosis(store, "o", rendered(messages=shown, pictures=["two"]), "a").result(4)
    assert other["diagnostics"]["cache_miss_reason"] == {"type": "messages_changed", "cache_missed_input_tokens": 5}
    tools = Diagnosis(store, "o", rendered(tools=[TOOL], messages=[]), "a").result(9)
    assert tools["diagnostics"]["cache_miss_reason"] == {"type": "tools_changed", "cache_missed_input_tokens": 0}
    model = Diagnosis(store, "o", rendered(model="n", messages=[]), "a").result(20)
    assert model["diagnostics"]["cache_miss_reason"] == {"type": "model_changed", "cache_missed_input_tokens": 0}


def test_digests_are_stored_per_key_and_only_with_memory() -> None:
    store = ResponseStore(1 << 20)
    Diagnosis(store, "o", rendered()).keep("a", 9)
    foreign = Diagnosis(store, "p", rendered(), "a").result(0)
    assert foreign["diagnostics"]["cache_miss_reason"] == {"type": "previous_message_not_found"}
    off = Diagnosis(ResponseStore(0), "o", rendered(), "a").result(0)
    assert off["diagnostics"]["cache_miss_reason"] == {"type": "unavailable"}


def respond(server: ServerProcess, earlier_id: Any = None, **changed: Any) -> dict[str, Any]:
    body = RESPONSE | {"input": [QUESTION]} | changed
    if earlier_id is not None:
        body["prompt_cache_options"] = {"comparison_response_id": earlier_id}
    answer: dict[str, Any] = server.post("/v1/responses", **body).json()
    return answer


@pytest.fixture(scope="module")
def response(server: ServerProcess) -> dict[str, Any]:
    return respond(server)


def test_responses_that_continue_the_one_they_name_hit(server: ServerProcess, response: dict[str, Any]) -> None:
    assert "prompt_cache_diagnostics" not in response
    whole = [QUESTION, *response["output"], LATER]
    for fields in ({"input": whole}, {"previous_response_id": response["id"], "input": [LATER]}, {}):
        answer = respond(server, response["id"], **fields)
        assert answer["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        options = {"mode": "implicit", "ttl": "30m", "comparison_response_id": response["id"]}
        assert answer["prompt_cache_options"] == options
        stored = server.get(f"/v1/responses/{answer['id']}").json()
        assert stored["prompt_cache_diagnostics"] == {"type": "cache_hit"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"instructions": "be brief!"}, "input_changed"),
        ({"input": [LATER, QUESTION]}, "input_changed"),
        ({"input": "what?", "reasoning": {"effort": "low"}}, "reasoning_effort_changed"),
        ({"input": [EFFORT, QUESTION]}, "reasoning_effort_changed"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}, LATER]}, "context_compacted"),
    ],
)
def test_the_first_difference_from_a_response_is_the_reason(
    server: ServerProcess, response: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    answer = respond(server, response["id"], **changed)
    missed = response["usage"]["input_tokens"] - answer["usage"]["input_tokens_details"]["cached_tokens"]
    expected = {"type": "cache_miss", "reason": reason, "cache_missed_tokens": max(0, missed)}
    assert answer["prompt_cache_diagnostics"] == expected


def test_tools_of_responses_are_compared(json_server: ServerProcess) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
    first = respond(json_server, tools=tools[:1])
    again, other = (respond(json_server, first["id"], tools=[tool], stream=False) for tool in tools)
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert other["prompt_cache_diagnostics"]["reason"] == "tools_changed"


def test_stored_updates_and_earlier_turns_are_compared(server: ServerProcess, response: dict[str, Any]) -> None:
    second = respond(server, previous_response_id=response["id"], input=[EFFORT, LATER])
    third = respond(server, second["id"], previous_response_id=second["id"], input=[LATER])
    assert third["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert third["reasoning"]["effort"] == "low"


def test_models_are_compared_before_other_parts_of_prompts() -> None:
    given = {"model": "n", "tools": [TOOL], "messages": [LATER], "pictures": (), "settings": {"effort": "low"}}
    for model, reason in (("n", "model_changed"), ("m", "tools_changed")):
        found = Comparison.of(rendered(**given | {"model": model}), rendered(), 9, is_compacted=True).diagnostics(4)
        assert found == {"type": "cache_miss", "reason": reason, "cache_missed_tokens": 5}


def test_unstored_responses_are_not_found_and_malformed_options_refused(server: ServerProcess) -> None:
    for earlier_id in ("resp_0", respond(server, store=False)["id"]):
        assert respond(server, earlier_id)["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    for name, value in (("comparison_response_id", 5), ("prewarm", "yes")):
        refused = server.post("/v1/responses", input="x", prompt_cache_options={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"prompt_cache_options.{name}")


@pytest.mark.parametrize("stream", [False, True])
def test_prewarmed_prompts_generate_nothing_and_are_hit(server: ServerProcess, *, stream: bool) -> None:
    asked = {"input": f"warm up, {stream}", "prompt_cache_options": {"prewarm": True}, "stream": stream}
    answer = server.post("/v1/responses", **asked)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
        warmed = events[-1]["response"]
    else:
        warmed = answer.json()
    assert (warmed["status"], warmed["output"], warmed["usage"]["output_tokens"]) == ("completed", [], 0)
    usage = respond(server, instructions=None, input=asked["input"])["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"], "cache_write_tokens": 0}


def test_prewarming_overrules_limits_and_required_calls(json_server: ServerProcess) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    asked = {"input": "warm up", "tools": tools, "tool_choice": "required", "max_output_tokens": 40}
    warmed = json_server.post("/v1/responses", **asked, prompt_cache_options={"prewarm": True}).json()
    assert (warmed["status"], warmed["output"], warmed["usage"]["output_tokens"]) == ("completed", [], 0)
    assert warmed["incomplete_details"] is None
    usage = json_server.post("/v1/responses", **asked, prompt_cache_options={"prewarm": False}).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"]
    assert usage["output_tokens"] > 0
