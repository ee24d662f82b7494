"""Anthropic's ``diagnostics``: where a prompt differs from an earlier one."""

from typing import Any

import anthropic
import pytest

from strandline.server.messages.diagnostics import Diagnosis, Rendered
from strandline.server.requests.response_store import ResponseStore
from tests.cpu.server.process import TIMEOUT_S, ServerProcess

BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "temperature": 0, "system": "be brief"}
TOOL = {"type": "function", "function": {"name": "f"}}
QUESTION = {"role": "user", "content": "who is it, and why?"}
MARKED = {"type": "text", "text": "who is it, and why?", "cache_control": {"type": "ephemeral"}}
LATER = {"role": "user", "content": "so?"}


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
        ({"messages": [LATER, QUESTION]}, "messages_changed"),
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
