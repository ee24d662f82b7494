"""Stored responses: continuing, reading and deleting them; limits; API keys."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.server.http.error_responses import UnknownPreviousResponseError, UnknownResponseError
from strandline.server.requests.response_store import ResponseStore
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_get, http_post, running_server

KEYS = ("first-key", "second-key")


def response(name: str, previous: str | None = None, text: str = "") -> dict[str, Any]:
    output = [{"id": f"msg_{name}", "type": "message", "content": text}]
    return {"id": name, "previous_response_id": previous, "output": output}


def asked(name: str) -> list[dict[str, Any]]:
    return [{"id": f"in_{name}", "type": "message", "content": name}]


def test_a_conversation_is_all_that_came_before_in_order() -> None:
    store = ResponseStore(1 << 20)
    store.add("", response("a"), asked("a"))
    store.add("", response("b", "a"), asked("b"))
    store.add("", response("c", "a"), asked("c"))
    ids = [item["id"] for item in store.conversation("", "b")]
    assert ids == ["in_a", "msg_a", "in_b", "msg_b"]
    assert [item["id"] for item in store.input_items("", "c")] == ["in_a", "msg_a", "in_c"]
    assert store.item("", "msg_b") == response("b")["output"][0]
    assert store.item("", "in_b") == asked("b")[0]
    store.remove("", "a")
    assert store.response("", "b")["previous_response_id"] == "a"
    for name in ("a", "b"):
        with pytest.raises(UnknownPreviousResponseError):
            store.conversation("", name)
    assert store.item("", "msg_a") is None


def test_nothing_of_one_owner_is_visible_to_another() -> None:
    store = ResponseStore(1 << 20)
    store.add("a", response("a"), asked("a"))
    for call in (store.response, store.remove, store.input_items):
        with pytest.raises(UnknownResponseError):
            call("b", "a")
    with pytest.raises(UnknownPreviousResponseError):
        store.conversation("b", "a")
    assert store.item("b", "msg_a") is None
    assert store.response("a", "a")["id"] == "a"


def test_what_a_used_response_continues_is_dropped_last() -> None:
    one_bytes = size_of(response("a"))
    store = ResponseStore(3 * one_bytes + one_bytes // 2)
    store.add("", response("a"), asked("a"))
    store.add("", response("x"), asked("x"))
    store.add("", response("b", "a"), asked("b"))
    assert store.conversation("", "b")
    store.add("", response("c", "b"), asked("c"))
    assert [item["id"] for item in store.conversation("", "c")][::2] == ["in_a", "in_b", "in_c"]
    with pytest.raises(UnknownResponseError):
        store.response("", "x")


def size_of(stored: dict[str, Any]) -> int:
    store = ResponseStore(1 << 30)
    store.add("", stored, asked(stored["id"]))
    return store.num_bytes


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=40), st.integers(1, 20_000))
def test_a_store_is_never_larger_than_its_limit(added: list[tuple[int, int]], max_bytes: int) -> None:
    store = ResponseStore(max_bytes)
    for number, length in added:
        name = f"r{number}"
        try:
            store.remove("", name)
        except UnknownResponseError:
            store.add("", response(name, text="x" * length), asked(name))
        assert store.num_bytes <= max_bytes
    for number in range(10):
        try:
            store.remove("", f"r{number}")
        except UnknownResponseError:
            continue
    assert (store.num_bytes, len(store)) == (0, 0)
    assert store.item("", "msg_r1") is None


def test_a_response_larger_than_the_store_drops_no_other() -> None:
    store = ResponseStore(size_of(response("a")) + 100)
    store.add("", response("a"), asked("a"))
    store.add("", response("b", text="x" * 5000), asked("b"))
    assert len(store) == 1
    assert store.response("", "a")


# Over HTTP


@pytest.fixture(scope="module")
def keyed(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two API keys and a small store."""
    flags = ["--api-key", *KEYS, "--response-store", "64KiB"]
    with running_server(bytes_dir, tmp_path_factory.mktemp("keyed") / "log", *flags) as server:
        yield server


def client_of(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 5}


def test_a_response_is_continued_as_if_all_had_been_sent(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="who is it?", instructions="be brief")
    assert first.store
    second = client.responses.create(**ASKED, input="why?", previous_response_id=first.id, stream=True)
    *_, last = second
    assert last.type == "response.incomplete"
    assert last.response.previous_response_id == first.id
    sent: list[Any] = [{"role": "user", "content": "who is it?"}, *first.output, {"role": "user", "content": "why?"}]
    whole = client.responses.create(**ASKED, input=sent, store=False)
    assert whole.output_text == last.response.output_text
    assert whole.usage is not None
    assert last.response.usage is not None
    assert whole.usage.input_tokens == last.response.usage.input_tokens
    referred = [
        {"role": "user", "content": "who is it?"},
        {"type": "item_reference", "id": first.output[0].id},
        sent[-1],
    ]
    again = client.responses.create(**ASKED, input=referred)
    assert again.output_text == whole.output_text


def test_stored_responses_are_read_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="who is it?")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(
        **ASKED, input=[{"role": "user", "content": "why?"}], previous_response_id=first.id
    )
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"] * 3
    assert items[0].content[0].text == "who is it?"  # type: ignore[union-attr]
    assert items[1].id == first.output[0].id
    with pytest.raises(openai.BadRequestError, match="only responses with background"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="not found") as error:
        client.responses.create(**ASKED, input="so?", previous_response_id=second.id)
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASKED, input="who is it?", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_key_does_not_read_what_another_stored(keyed: ServerProcess) -> None:
    with client_of(keyed, KEYS[0]) as owner, client_of(keyed, KEYS[1]) as other:
        first = owner.responses.create(**ASKED, input="who is it?")
        assert owner.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**ASKED, input="why?", previous_response_id=first.id)
        options = {"prompt_cache_options": {"comparison_response_id": first.id}}
        for client, expected in ((owner, "cache_hit"), (other, "comparison_response_not_found")):
            compared = client.responses.create(**ASKED, input="who is it?", extra_body=options).to_dict()
            assert compared["prompt_cache_diagnostics"] == {"type": expected}
    assert http_get(f"{keyed.url}/v1/responses/{first.id}").status_code == 401


def test_old_responses_are_dropped_when_the_store_is_full(keyed: ServerProcess) -> None:
    with client_of(keyed, KEYS[0]) as client:
        ids = [client.responses.create(**ASKED, input="x" * 150, metadata={"a": "y" * 9000}).id for _ in range(10)]
        assert client.responses.retrieve(ids[-1]).id == ids[-1]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[0])


def test_a_text_that_cannot_be_repeated_is_refused(server: ServerProcess) -> None:
    for field in ({"metadata": {"a": "\ud800"}}, {"tools": [{"type": "web_search", "x": "\udfff"}]}):
        content = json.dumps({"model": "tiny", "input": "x", "max_output_tokens": 1, **field})
        headers = {"Content-Type": "application/json"}
        answer = http_post(f"{server.url}/v1/responses", content=content, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in field
