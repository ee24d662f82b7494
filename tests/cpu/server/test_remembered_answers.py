"""Sessions by each API, streamed and not: a turn hits all of the turn before, in whatever tokens it was generated."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import pytest

from strandline.text.model_files import DEMO_DIRECTORY
from tests.cpu.server.process import ServerProcess, http_stream, running_server

SCHEMA: Final = {
    "type": "object",
    "properties": {"path": {"enum": ["a.txt", "notes/today.md"]}, "tool": {"type": "string", "maxLength": 8}},
    "required": ["path", "tool"],
    "additionalProperties": False,
}
TASK: Final = "Read the file, please."
SAMPLED: Final = 1.5


class Turn(NamedTuple):
    """One request's usage, and the conversation with its answer and what follows."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    history: list[Any]

    @property
    def computed_tokens(self) -> int:
        """All but the last token, which is sampled and not computed."""
        return self.prompt_tokens + self.output_tokens - 1


class Api(Protocol):
    """How one of the APIs is spoken."""

    calls: dict[str, Any]
    structure: dict[str, Any]
    stop: str

    def turn(self, server: ServerProcess, history: list[Any], *, stream: bool, **fields: Any) -> Turn: ...

    def count(self, server: ServerProcess, history: list[Any], **fields: Any) -> int: ...


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the data of a stream's events."""
    with http_stream("POST", server.url + path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def posted(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


class Chat:
    function: Final = {"name": "read_file", "parameters": SCHEMA}
    calls: Final = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    structure: Final = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA, "strict": True}}
    }
    stop = "stop"

    def turn(self, server: ServerProcess, history: list[Any], *, stream: bool, **fields: Any) -> Turn:
        body = {"messages": history, "max_tokens": 100, "stream_options": {"include_usage": True}, **fields}
        if not stream:
            answer = posted(server, "/v1/chat/completions", {**body, "stream_options": None})
            message, usage = answer["choices"][0]["message"], answer["usage"]
        else:
            *chunks, last = events(server, "/v1/chat/completions", body)
            message, usage = self._joined([chunk["choices"][0]["delta"] for chunk in chunks]), last["usage"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "It is empty."}
            for call in message.get("tool_calls") or ()
        ]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        after = [*history, message, *(results or [{"role": "user", "content": "Go on."}])]
        return Turn(usage["prompt_tokens"], cached, usage["completion_tokens"], after)

    def _joined(self, deltas: list[Any]) -> dict[str, Any]:
        calls: list[Any] = []
        for delta in deltas:
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append({**call, "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        return {**message, **({"tool_calls": calls} if calls else {})}

    def count(self, server: ServerProcess, history: list[Any], **fields: Any) -> int:
        body = {name: fields[name] for name in ("tools", "cache_salt") if name in fields}
        count: int = posted(server, "/tokenize", {"messages": history, **body})["count"]
        return count


class Messages:
    calls: Final = {
        "tools": [{"name": "read_file", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    structure: Final = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    stop = "stop_sequences"

    def turn(self, server: ServerProcess, history: list[Any], *, stream: bool, **fields: Any) -> Turn:
        body = {"messages": history, "max_tokens": 100, **fields}
        if not stream:
            answer = posted(server, "/v1/messages", body)
            blocks, usage = answer["content"], answer["usage"]
        else:
            found = events(server, "/v1/messages", body)
            blocks = self._joined(found)
            usage = next(event["usage"] for event in found if event["type"] == "message_delta")
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "It is empty."}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        after = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or "Go on."}]
        cached = usage["cache_read_input_tokens"]
        return Turn(usage["input_tokens"] + cached, cached, usage["output_tokens"], [*history, *after])

    def _joined(self, found: list[Any]) -> list[Any]:
        blocks: list[Any] = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        for event in found:
            if event["type"] == "content_block_delta" and "text" in event["delta"]:
                blocks[event["index"]]["text"] += event["delta"]["text"]
        for index, block in enumerate(blocks):
            parts = [
                event["delta"]["partial_json"]
                for event in found
                if event["type"] == "content_block_delta"
                and event["index"] == index
                and "partial_json" in event["delta"]
            ]
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(parts))
        return blocks

    def count(self, server: ServerProcess, history: list[Any], **fields: Any) -> int:
        body = {name: fields[name] for name in ("tools", "cache_salt") if name in fields}
        count: int = posted(server, "/v1/messages/count_tokens", {"messages": history, **body})["input_tokens"]
        return count


class Responses:
    calls: Final = {
        "tools": [{"type": "function", "name": "read_file", "parameters": SCHEMA}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    structure: Final = {"text": {"format": {"type": "json_schema", "name": "file", "schema": SCHEMA, "strict": True}}}
    stop = ""

    def turn(self, server: ServerProcess, history: list[Any], *, stream: bool, **fields: Any) -> Turn:
        body = {"input": history, "max_output_tokens": 100, **fields}
        if stream:
            answer = events(server, "/v1/responses", body)[-1]["response"]
        else:
            answer = posted(server, "/v1/responses", body)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "It is empty."}
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        after = [*history, *answer["output"], *(results or [{"role": "user", "content": "Go on."}])]
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Turn(usage["input_tokens"], cached, usage["output_tokens"], after)

    def count(self, server: ServerProcess, history: list[Any], **fields: Any) -> int:
        return 0  # this API counts nothing


APIS: Final[dict[str, Api]] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two engines of the demo model, whose answers under grammars are not in the tokenizer's tokens."""
    log = tmp_path_factory.mktemp("demo") / "log"
    flags = ("--data-parallel-size", "2", "--memory", "96MiB", "--max-model-len", "2048")
    with running_server(DEMO_DIRECTORY, log, *flags) as server:
        yield server


def run_session(
    server: ServerProcess, api: Api, salt: str, num_turns: int, *, stream: bool, **fields: Any
) -> list[Turn]:
    """Return the turns of a session, after checking that each hits all that the one before has computed."""
    turns: list[Turn] = []
    history: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(num_turns):
        counted = api.count(server, history, cache_salt=salt, **fields)
        turn = api.turn(server, history, stream=stream, cache_salt=salt, **fields)
        assert counted in (0, turn.prompt_tokens)
        assert not turns or turn.cached_tokens >= turns[-1].computed_tokens
        turns.append(turn)
        history = turn.history
    return turns


def is_encoded_otherwise(server: ServerProcess, turn: Turn, **fields: Any) -> bool:
    """Return whether a conversation has another number of tokens when no answer is remembered."""
    own = posted(server, "/tokenize", {"messages": turn.history, "cache_salt": turn_salt(fields), **tools_of(fields)})
    others = posted(server, "/tokenize", {"messages": turn.history, "cache_salt": "no one's", **tools_of(fields)})
    return bool(own["tokens"] != others["tokens"])


def turn_salt(fields: dict[str, Any]) -> str:
    return str(fields["cache_salt"])


def tools_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"tools": fields["tools"]} if "tools" in fields else {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", APIS)
def test_agent_with_forced_calls_hits_every_turn(server: ServerProcess, name: str, stream: bool) -> None:
    api, salt = APIS[name], f"calls {name} {stream}"
    turns = run_session(server, api, salt, 3 if name == "chat" else 2, stream=stream, temperature=0, **api.calls)
    if name == "chat":
        assert is_encoded_otherwise(server, turns[-1], cache_salt=salt, **api.calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", APIS)
def test_answers_of_a_schema_are_hit(server: ServerProcess, name: str, stream: bool) -> None:
    api = APIS[name]
    run_session(server, api, f"schema {name} {stream}", 2, stream=stream, temperature=0.8, **api.structure)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", APIS)
def test_sampled_answers_are_hit(server: ServerProcess, name: str, stream: bool) -> None:
    run_session(server, APIS[name], f"sampled {name} {stream}", 2, stream=stream, temperature=SAMPLED)


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_answers_that_end_at_a_stop_string_are_hit(server: ServerProcess, name: str) -> None:
    api, salt = APIS[name], f"stop {name}"
    history = [{"role": "user", "content": "What is 2 + 3?"}]
    first = api.turn(server, history, stream=False, temperature=0, cache_salt=salt, **{api.stop: [" 5."]})
    again = api.turn(server, first.history, stream=False, temperature=0, cache_salt=salt)
    assert again.cached_tokens >= first.computed_tokens - 2, "all before the three tokens of the stop string"


def test_another_salt_gets_the_tokenizers_tokens(server: ServerProcess) -> None:
    api = APIS["chat"]
    turn = run_session(server, api, "one", 2, stream=False, temperature=0, **api.calls)[-1]
    tools = tools_of(api.calls)
    texts = [
        posted(server, "/tokenize", {"messages": turn.history, "cache_salt": salt, **tools}) for salt in ("one", "two")
    ]
    assert texts[0]["tokens"] != texts[1]["tokens"]
    shown = [posted(server, "/detokenize", {"tokens": text["tokens"]})["prompt"] for text in texts]
    assert shown[0] == shown[1]
    other = api.turn(server, turn.history, stream=False, cache_salt="two", **api.calls)
    assert other.prompt_tokens == texts[1]["count"]


def test_account_explanation_and_metrics_tell_of_it(server: ServerProcess) -> None:
    before = server.metric("remembered_answer_tokens_total")
    body = {"messages": [{"role": "user", "content": TASK}], "temperature": 0, "max_tokens": 30, "cache_salt": "told"}
    first = posted(server, "/v1/chat/completions", {**body, "include_cache_account": True})
    assert "remembered" not in first["usage"]["cache"]
    answer = first["choices"][0]["message"]
    history = [*body["messages"], answer, {"role": "user", "content": "Go on."}]  # type: ignore[misc]
    asked = {"messages": history, "cache_salt": "told"}
    unsent = posted(server, "/cache/explain", asked)["account"]
    second = posted(server, "/v1/chat/completions", {**body, "messages": history, "include_cache_account": True})
    account = second["usage"]["cache"]
    assert account["remembered"] == unsent["remembered"] == first["usage"]["completion_tokens"]
    assert account["hit"] >= first["usage"]["total_tokens"] - 1
    sent = posted(server, "/cache/explain", {"request_id": second["id"] + "-0", "cache_salt": "told"})
    assert sent["account"]["remembered"] == account["remembered"]
    assert server.metric("remembered_answer_tokens_total") - before == account["remembered"]
    assert server.metric("remembered_answers_total") > 0


def test_answer_of_a_client_that_left_is_remembered(server: ServerProcess) -> None:
    api, salt, history = APIS["chat"], "left", [{"role": "user", "content": TASK}]
    body = {"messages": history, "temperature": SAMPLED, "max_tokens": 60, "cache_salt": salt, "seed": 3}
    text = ""
    with http_stream("POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(text) > 12:
                break
    after = {"messages": [*history, {"role": "assistant", "content": text}, history[0]], "cache_salt": salt}
    server.wait_until(lambda: "remembered" in posted(server, "/cache/explain", after)["account"])
    assert api.count(server, after["messages"], cache_salt=salt) > 0  # type: ignore[arg-type]
