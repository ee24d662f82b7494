"""Conversations that the server holds for Anthropic's clients: ``thread``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from strandline.server.http.error_responses import ThreadError
from strandline.server.messages.threads import read_thread
from strandline.server.requests.response_store import ResponseStore
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

MARK = {"cache_control": {"type": "ephemeral"}}
CREATE = {"type": "create"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 5}
TOOLS = [{"name": "f", "input_schema": {"type": "object"}, **MARK}]


def user(text: str) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": text, **MARK}]}


def after(message_id: str) -> Any:
    return {"type": "continue", "previous_message_id": message_id}


@pytest.fixture
def anthropic_client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def test_a_thread_has_the_prompt_of_the_whole_conversation(server: ServerProcess) -> None:
    system, whole = [{"type": "text", "text": "be brief", **MARK}], [user("who is it?")]
    body = {**ASKED, "return_token_ids": True, "temperature": 0}
    first = server.post("/v1/messages", **body, system=system, messages=whole, thread=CREATE).json()
    whole += [{"role": "assistant", "content": first["content"]}, user("why?")]
    second = server.post("/v1/messages", **body, messages=[whole[-1]], thread=after(first["id"])).json()
    assert second == server.post("/v1/messages", **body, system=system, messages=whole).json() | {
        "id": second["id"],
        "usage": second["usage"],
    }
    stated = [{"type": "text", "text": "be brief"}]
    third = server.post(
        "/v1/messages", **body, system=stated, messages=[user("so?")], thread=after(second["id"]), stream=True
    )
    assert third.status_code == 200
    again = server.post("/v1/messages", **body, messages=[user("hm")], thread=after(first["id"]))
    assert again.json()["usage"]["cache_read_input_tokens"] >= len("s:be brief|u:who is it?|a:")


def test_counted_tokens_are_those_of_the_whole_thread(server: ServerProcess) -> None:
    first = server.post("/v1/messages", **ASKED, system="s", messages=[user("who?")], thread=CREATE).json()
    asked = {"messages": [user("why?")], "thread": after(first["id"])}
    counted = server.post("/v1/messages/count_tokens", model="tiny", **asked).json()
    usage = server.post("/v1/messages", **ASKED, **asked).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    unknown = server.post("/v1/messages/count_tokens", **ASKED, messages=[user("why?")], thread=after("msg_none"))
    assert unknown.status_code == 404


def test_anthropics_package_holds_a_conversation_in_a_thread(anthropic_client: anthropic.Anthropic) -> None:
    thread = anthropic_client.beta.messages.thread(**ASKED, system="s")
    hits = []
    for _ in range(6):  # each turn has a mark of its own: together they are more than one request may have
        message = thread.send(user("a question"))
        assert thread.previous_message_id == message.id
        hits.append(message.usage.cache_read_input_tokens or 0)
    assert hits[1:] == sorted(set(hits[1:]))
    assert hits[1] > 0
    with thread.stream(user("the last one")) as stream:
        assert stream.get_final_message().id == thread.previous_message_id


def test_an_unknown_thread_is_refused_in_anthropics_words(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=r"no thread is stored for the message 'msg_none'") as unknown:
        anthropic_client.beta.messages.create(**ASKED, messages=[user("b")], thread=after("msg_none"))
    body: Any = unknown.value.body
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


def test_a_thread_is_no_response_of_the_other_api(server: ServerProcess) -> None:
    first = server.post("/v1/messages", **ASKED, messages=[user("a")], thread=CREATE).json()
    assert server.get(f"/v1/responses/{first['id']}").status_code == 404


def test_without_a_store_there_are_no_threads_and_no_comparisons(bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--response-store", "0") as server:
        refused = server.post("/v1/messages", **ASKED, messages=[user("a")], thread=CREATE)
        assert refused.status_code == 400
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
            thread = client.beta.messages.thread(**ASKED, unsupported_request_behavior="continue_unthreaded")
            assert thread.send(user("a")).id.startswith("msg_")
            assert thread.previous_message_id is None
        options = {"comparison_response_id": "resp_0"}
        response = server.post("/v1/responses", input="a", max_output_tokens=1, prompt_cache_options=options).json()
        assert response["prompt_cache_diagnostics"] == {"type": "unavailable"}


def test_a_thread_that_is_warmed_up_is_not_continued(server: ServerProcess) -> None:
    warm = {**ASKED, "max_tokens": 0}
    message = server.post("/v1/messages", **warm, messages=[user("a")], thread=CREATE).json()
    assert message["usage"]["output_tokens"] == 0
    assert server.post("/v1/messages", **ASKED, messages=[user("b")], thread=after(message["id"])).status_code == 404


def read(store: ResponseStore, thread: dict[str, str], messages: list[Any], owner: str = "", **fields: Any) -> Any:
    return read_thread(thread, {"system": None, "tools": None} | fields, messages, store, owner)


def test_tools_and_system_are_those_of_the_first_request() -> None:
    store = ResponseStore(100_000)
    read(store, CREATE, [user("a")], tools=TOOLS, system="s").keep("m", [{"type": "text", "text": "b"}])
    read(store, after("m"), [user("c")]).keep("n", [])
    thread = read(store, after("n"), [user("d")], system="s")
    assert thread.head == {"system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    said = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in "ac"]
    answers = [{"role": "assistant", "content": content} for content in ([{"type": "text", "text": "b"}], [])]
    assert thread.earlier == [said[0], answers[0], said[1], answers[1]]
    with pytest.raises(ThreadError, match="system and tools cannot change in a thread") as changed:
        read(store, after("n"), [user("d")], system="t", tools=TOOLS * 2)
    assert changed.value.error_code == "thread_fingerprint_mismatch"


def test_threads_belong_to_their_api_key() -> None:
    store = ResponseStore(100_000)
    read(store, CREATE, [user("a")], "one").keep("m", [])
    with pytest.raises(ThreadError, match="no thread is stored"):
        read(store, after("m"), [user("b")], "two")


def test_an_error_names_the_message_of_the_request(server: ServerProcess) -> None:
    first = server.post("/v1/messages", **ASKED, messages=[user("a")], thread=CREATE).json()
    broken = [user("b"), {"role": "user", "content": [{"type": "tool_result"}]}]
    error = server.post("/v1/messages", **ASKED, messages=broken, thread=after(first["id"])).json()["error"]
    assert error["message"].startswith("messages.1.content.0")
