"""``/cache`` without a browser: the page's data, what they must not reveal, and explanations."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strandline import LLM, SamplingParams
from strandline.errors import RequestError
from strandline.server.cache_page import PAGE
from strandline.server.config import ServerConfig
from tests.cpu.server.process import ServerProcess, http_get, http_post, running_server

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def reserved(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that shows no text, to holders of a key alone."""
    flags = ["--api-key", "secret", "--cache-page", "counts"]
    with running_server(bytes_dir, tmp_path_factory.mktemp("reserved") / "log", *flags) as server:
        yield server


def complete(server: ServerProcess, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "include_cache_account": True, **fields}
    answer = http_post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(server: ServerProcess, **headers: str) -> Any:
    answer = http_get(f"{server.url}/cache/state", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    return answer.json()


def explain(server: ServerProcess, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    answer = http_post(f"{server.url}/cache/explain", json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: ServerProcess, **fields: Any) -> str:
    answer = server.post("/cache/explain", **fields)
    assert answer.status_code == 400
    return str(answer.json()["error"]["message"])


def test_state_has_lookups_as_in_usage(server: ServerProcess) -> None:
    told = [complete(server, "the state " * 12 + end) for end in ("", "and more", "and less")]
    shown = {row["request_id"]: row["account"] for row in state(server)["lookups"]}
    for answer in told:
        assert shown[f"{answer['id']}-0"] == answer["usage"]["cache"]


def test_state_has_the_text_that_is_new_in_each_request(server: ServerProcess) -> None:
    begin = "{seen and then something"  # no other test's prompt begins so
    prompts = [f"{begin} {end}" for end in ("quite new", "quieter still")]
    names = [f"{complete(server, prompt)['id']}-0" for prompt in prompts]
    texts = {row["request_id"]: row["text"] for row in state(server)["lookups"]}
    assert texts[names[0]].startswith(begin)
    assert texts[names[1]] == "quieter still"


def test_state_has_tree_with_text_and_memory_adds_up(server: ServerProcess) -> None:
    complete(server, "seen on the page " * 10)
    shown = state(server)
    assert any(run["text"] and "seen on the page" in run["text"] for run in shown["tree"]["runs"])
    assert shown["shows_text"] is True
    held = shown["memory"][-1][1:]
    assert sum(held) + shown["stats"]["bytes_by_use"]["free"] == shown["total_bytes"]
    assert "other_salt" not in shown["stats"]["missed_tokens"]


def test_a_past_request_is_explained_by_its_answers_id(server: ServerProcess) -> None:
    complete(server, "why did it " * 12 + "miss?")
    answer = complete(server, "why did it " * 12 + "hit?")
    told = explain(server, request_id=answer["id"])
    assert told["account"] == answer["usage"]["cache"]
    assert told["parting"]["position"] == 132
    assert told["parting"]["prompt"]["text"] == "hit?"
    assert told["parting"]["cached"][0]["text"].startswith("miss?")
    assert [advice["help"] for advice in told["advice"]] == ["mark"]
    assert told["now"]["hit"] == 136


def test_explain_predicts_hits_and_changes_nothing(server: ServerProcess) -> None:
    complete(server, "what if " * 20)
    server.wait_until_idle()
    before = state(server)
    prompts: list[dict[str, Any]] = [{"prompt": "what if " * 20 + "not"}, {"prompt": [119, 104, 97, 116]}]
    told = [explain(server, **prompt) for prompt in prompts]
    after = state(server)
    assert (before["tree"], before["stats"], before["lookups"][0]["request_id"]) == (
        *(after["tree"], after["stats"]),
        after["lookups"][0]["request_id"],
    )
    for prompt, data in zip(prompts, told, strict=True):
        assert complete(server, **prompt)["usage"]["cache"] == data["account"]


def test_conversation_is_explained_as_chat_api_renders_it(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "explain me " * 9}]
    asked = {"messages": messages, "max_tokens": 2, "include_cache_account": True}
    server.post("/v1/chat/completions", **asked)
    told = explain(server, messages=messages)
    assert told["account"]["hit"] == told["account"]["queried"] > 90
    assert server.post("/v1/chat/completions", **asked).json()["usage"]["cache"] == told["account"]


def test_anthropic_conversation_is_explained_as_its_api_renders_it(json_server: ServerProcess) -> None:
    tools = [{"name": "clock", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what time is it? " * 5}]}]
    }
    body |= {"system": [{"type": "text", "text": "You are a clock."}], "tools": tools}
    answer = json_server.post("/v1/messages", **body, max_tokens=2)
    assert answer.status_code == 200, answer.text
    counts = answer.json()["usage"]
    account = explain(json_server, **body)["account"]
    assert account["hit"] == account["queried"] == counts["input_tokens"] + counts["cache_read_input_tokens"]
    assert explain(json_server, **{**body, "system": "You are no clock."})["account"]["hit"] < account["hit"]


def test_prompt_of_another_salt_is_invisible(server: ServerProcess) -> None:
    theirs, unseen = "the words of one tenant " * 8, "words never sent before " * 8
    complete(server, theirs, cache_salt="its owner")
    server.wait_until_idle()

    def told(prompt: str, salt: str) -> tuple[Any, ...]:
        before = state(server)["stats"]
        explained = explain(server, prompt=prompt, cache_salt=salt)
        cache = complete(server, prompt, cache_salt=salt)["usage"]["cache"]
        after = state(server)["stats"]
        counted = {key: after["missed_tokens"][key] - before["missed_tokens"][key] for key in after["missed_tokens"]}
        assert cache["queried"] == cache["hit"] + sum(miss["tokens"] for miss in cache["misses"])
        return explained, cache, counted, after["queried_tokens"] - before["queried_tokens"]

    assert told(theirs, "a stranger") == told(unseen, "another stranger")
    assert 'reason="other_salt"' not in server.metrics()


def test_salted_entries_are_shown_only_with_their_salt(server: ServerProcess) -> None:
    said = "}a tenant's words " * 10  # no other test's prompt begins so
    before = explain(server, prompt=said + "x")["account"]
    answer = complete(server, said, cache_salt="tenant %")
    name = f"{answer['id']}-0"
    shown = state(server)
    assert "a tenant's words" not in str(shown)
    assert "tenant %" not in str(shown)
    [row] = [row for row in shown["lookups"] if row["request_id"] == name]
    assert row["salt_label"]
    assert row["text"] is None
    assert "under a salt" in refusal(server, request_id=name)
    assert "under a salt" in refusal(server, request_id=name, cache_salt="other")
    assert explain(server, request_id=name, cache_salt="tenant %")["now"]["hit"] == len(said)
    inside = state(server, **{"X-Cache-Salt": "tenant %25"})
    assert any(run["text"] and "a tenant's words" in run["text"] for run in inside["tree"]["runs"])
    assert explain(server, prompt=said + "x")["account"] == before
    assert before["hit"] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give one of request_id, prompt and messages"),
        ({"prompt": "x", "request_id": "y"}, "give one of"),
        ({"request_id": "missing"}, "'missing' is not among the last"),
        ({"prompt": ""}, "the prompt has 0 tokens"),
        ({"prompt": [256]}, "token 256 is not in the vocabulary"),
        ({"prompt": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompt": [1] * 5000}, "the prompt has 5000 tokens"),
        ({"messages": []}, "messages must be a list of at least 1 item"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_questions_that_make_no_sense_are_refused(server: ServerProcess, fields: dict[str, Any], message: str) -> None:
    assert message in refusal(server, **fields)


@pytest.mark.parametrize("name", ["prompt", "request_id", "cache_salt"])
def test_a_question_that_is_not_valid_unicode_is_refused(server: ServerProcess, name: str) -> None:
    body = json.dumps({"prompt": "x", name: "\ud800"} if name != "request_id" else {name: "\ud800"})
    headers = {"Content-Type": "application/json"}
    answer = http_post(f"{server.url}/cache/explain", content=body, headers=headers)
    assert answer.status_code == 400
    assert "not valid Unicode" in answer.json()["error"]["message"]


def test_page_is_public_and_its_data_need_the_key(reserved: ServerProcess) -> None:
    assert reserved.get("/cache").status_code == 200
    assert reserved.get("/cache/state").status_code == 401
    assert reserved.post("/cache/explain", prompt="x").status_code == 401
    assert http_get(f"{reserved.url}/cache/state", headers=KEY).status_code == 200


def test_counts_alone_hold_no_text_of_others(reserved: ServerProcess) -> None:
    complete(reserved, "a secret " * 10 + "first", KEY)
    answer = complete(reserved, "a secret " * 10 + "other", KEY)
    shown = state(reserved, **KEY)
    assert shown["shows_text"] is False
    assert {row["text"] for row in (*shown["tree"]["runs"], *shown["lookups"])} == {None}
    told = explain(reserved, KEY, request_id=answer["id"])
    assert told["parting"] == {"position": 90, "before": None, "prompt": None, "cached": []}
    assert told["account"] == answer["usage"]["cache"]
    own = explain(reserved, KEY, prompt="a secret " * 10 + "guess")["parting"]
    assert (own["prompt"]["text"], own["cached"]) == ("guess", [])


def test_text_is_shown_to_local_host_names_only(server: ServerProcess) -> None:
    complete(server, "for this machine " * 10)
    assert state(server)["shows_text"]
    assert state(server, Host="localhost")["shows_text"]
    stranger = http_get(f"{server.url}/cache/state", headers={"Host": "stranger.example"})
    assert stranger.status_code == 403
    assert "for this machine" not in stranger.text


def test_text_is_shown_by_default_only_locally() -> None:
    addresses = ("127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1")
    assert [ServerConfig().page_mode(address) for address in addresses] == ["local"] * 3 + ["counts"] * 2
    for given in ("text", "counts", "off"):
        assert {ServerConfig(cache_page=given).page_mode(address) for address in addresses} == {given}


def test_the_page_can_be_left_out(impatient_server: ServerProcess) -> None:
    assert [impatient_server.get(path).status_code for path in ("/cache", "/cache/state")] == [404, 404]
    assert impatient_server.post("/cache/explain", prompt="x").status_code == 404
    assert "cache page" not in impatient_server.log()


def test_page_is_self_contained_and_writes_no_html(server: ServerProcess) -> None:
    answer = server.get("/cache")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = PAGE.read_text()
    assert answer.text == text
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    for writes in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert writes not in text
    assert server.url + "/cache" in server.log()


def test_offline_a_prompt_is_explained_as_by_a_server(server: ServerProcess, bytes_dir: Path) -> None:
    llm = LLM(str(bytes_dir), memory="16MiB", device="cpu")
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.explain([])
    prompts = [f"explained in either place, {end}" for end in ("or not", "and here")]
    llm.generate(
        {"prompt": prompts[0], "cache_salt": "either"}, SamplingParams(max_tokens=2, temperature=0), use_tqdm=False
    )
    complete(server, prompts[0], cache_salt="either")
    for prompt in prompts:
        told = llm.explain({"prompt": prompt, "cache_salt": "either"})
        assert {**told, "engine": 0} == explain(server, prompt=prompt, cache_salt="either")
        assert told["account"]["kv_tokens"] > 20
