"""Reasoning in the three APIs: calls that end it, stop strings that do not hold in it, and the fields that carry it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.server.conftest import save_chat_model
from tests.cpu.server.process import ServerProcess, running_server

READ: dict[str, Any] = {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
CALL = '<think>\nI read.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>\n</think>'
QUESTION = "<think>\nQuestion: what?\n</think>\n\nIt is.\nQuestion: blue."
PARTS = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}


def events(server: ServerProcess, path: str, **body: Any) -> list[Any]:
    """Return the events of a streamed answer."""
    lines = server.post(path, stream=True, **body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def chat(server: ServerProcess, text: str, *, stop: list[str] | None = None, **more: Any) -> tuple[Any, ...]:
    """Return reasoning, content, calls, why the output ended and the stop string."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop": stop, "max_tokens": 200, **more}
    body |= {"structured_outputs": {"choice": [text]}, "tools": [{"type": "function", "function": READ}]}
    [choice] = server.post("/v1/chat/completions", **body).json()["choices"]
    message, deltas, last = choice["message"], dict.fromkeys(("reasoning", "content"), ""), {}
    arguments = ""
    for event in events(server, "/v1/chat/completions", **body):
        [last] = event["choices"]
        for name in deltas:
            deltas[name] += last["delta"].get(name) or ""
        for call in last["delta"].get("tool_calls", ()):
            arguments += call["function"]["arguments"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    found = message.get("reasoning", ""), message["content"] or "", "".join(calls)
    assert (deltas["reasoning"], deltas["content"], arguments) == found
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return *found, choice["finish_reason"], choice["stop_reason"]


def respond(server: ServerProcess, text: str, *, stop: list[str] | None = None) -> tuple[Any, ...]:
    body = {"input": "Hi", "stop": stop, "max_output_tokens": 200, "structured_outputs": {"choice": [text]}}
    body["tools"] = [{"type": "function", **READ}]
    items = server.post("/v1/responses", **body).json()["output"]
    [completed] = [x["response"] for x in events(server, "/v1/responses", **body) if x["type"] == "response.completed"]
    texts = [[item["type"], item.get("arguments") or item["content"][0]["text"]] for item in items]
    assert texts == [[x["type"], x.get("arguments") or x["content"][0]["text"]] for x in completed["output"]]
    found = dict(texts)
    return found.get("reasoning", ""), found.get("message", ""), found.get("function_call", "")


def write(server: ServerProcess, text: str, *, stop: list[str] | None = None) -> tuple[Any, ...]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stop_sequences": stop, "max_tokens": 200}
    body |= {"structured_outputs": {"choice": [text]}}
    body["tools"] = [{"name": "read", "input_schema": READ["parameters"]}]
    blocks = server.post("/v1/messages", **body).json()["content"]
    deltas = dict.fromkeys(PARTS, "")
    for event in events(server, "/v1/messages", **body):
        kind = event.get("delta", {}).get("type", "").removesuffix("_delta")
        if kind in PARTS:
            deltas[kind] += event["delta"][PARTS[kind]]
    found = {block["type"]: block.get("thinking") or block.get("text") or block.get("input") for block in blocks}
    assert deltas["thinking"] == found.get("thinking", "")
    assert deltas["text"] == found.get("text", "")
    assert json.loads(deltas["input_json"] or "null") == found.get("tool_use")
    return deltas["thinking"], deltas["text"], deltas["input_json"]


ASK: list[Callable[..., tuple[Any, ...]]] = [chat, respond, write]


@pytest.mark.parametrize("ask", ASK)
def test_call_inside_unclosed_reasoning_is_found(ask: Callable[..., Any], json_server: ServerProcess) -> None:
    reasoning, content, arguments = ask(json_server, CALL)[:3]
    assert (reasoning, content, json.loads(arguments)) == ("I read.", "", {"path": "a"})


@pytest.mark.parametrize("ask", ASK)
def test_stop_string_does_not_hold_inside_reasoning(ask: Callable[..., Any], json_server: ServerProcess) -> None:
    found = ask(json_server, QUESTION, stop=["Question:"])
    assert found[:2] == ("Question: what?", "It is.\n")
    assert found[3:] in ((), ("stop", "Question:"))
    found = ask(json_server, QUESTION, stop=["what?\n</think>\n\nIt"])
    assert found[:2] == ("Question: what?", "It is.\nQuestion: blue.")


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [(QUESTION, QUESTION.partition("\n\nIt")[0]), ("It is.", ""), ("<thin", ""), (" <think>a", " <think>a")],
)
def test_tokens_of_spelled_reasoning_are_counted(json_server: ServerProcess, text: str, reasoning: str) -> None:
    body = {"input": "Hi", "max_output_tokens": 200, "structured_outputs": {"choice": [text]}}
    usage = json_server.post("/v1/responses", **body).json()["usage"]
    num_end = reasoning == text  # the token that ends the output
    assert usage["output_tokens_details"]["reasoning_tokens"] == len(reasoning) + num_end


def test_stop_string_holds_for_all_text_of_completions(json_server: ServerProcess) -> None:
    body = {"prompt": "Hi", "stop": ["Question:"], "max_tokens": 200, "structured_outputs": {"choice": [QUESTION]}}
    [choice] = json_server.post("/v1/completions", **body).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("<think>\n", "Question:")


def test_reasoning_is_in_both_fields_or_left_out(json_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"choice": [QUESTION]}}
    body["max_tokens"] = 200
    message = json_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Question: what?"
    body["include_reasoning"] = False
    message = json_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert not message.keys() & {"reasoning", "reasoning_content"}
    assert message["content"] == "It is.\nQuestion: blue."
    deltas = [event["choices"][0]["delta"] for event in events(json_server, "/v1/chat/completions", **body)]
    assert not any(delta.keys() & {"reasoning", "reasoning_content"} for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (QUESTION, "It is.\nQuestion: blue."),
        ("It is.", "It is."),
        ("<think>\nIt", ""),
        (CALL.removesuffix("\n</think>"), CALL[CALL.index("<tool_call>") : CALL.index("\n</think>")]),
    ],
)
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"echo": True}])
def test_reasoning_that_is_left_out_has_no_logprobs(
    json_server: ServerProcess, text: str, shown: str, more: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "logprobs": True}
    body |= {"structured_outputs": {"choice": [text]}, "tools": [{"type": "function", "function": READ}]}
    if "echo" in more:
        body["messages"].append({"role": "assistant", "content": "It"})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
        shown = text  # a continued answer opens no reasoning
    body |= more
    [whole] = json_server.post("/v1/chat/completions", **body).json()["choices"]
    assert told(whole["logprobs"]["content"]).startswith(text)
    body["include_reasoning"] = False
    [whole] = json_server.post("/v1/chat/completions", **body).json()["choices"]
    assert told(whole["logprobs"]["content"]) == shown
    found = [event["choices"][0]["logprobs"] for event in events(json_server, "/v1/chat/completions", **body)]
    assert told([entry for logprobs in found if logprobs for entry in logprobs["content"]]) == shown


def told(entries: list[dict[str, Any]]) -> str:
    """Return the text of tokens with log-probabilities."""
    return bytes(value for entry in entries for value in entry["bytes"]).decode()


def test_flag_names_the_field_of_the_reasoning(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", "{{ messages[0].content }}<think>")
    with running_server(model, tmp_path / "log", "--reasoning-field", "reasoning") as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert "reasoning" in message
    assert "reasoning_content" not in message


def test_budget_ends_reasoning_before_a_required_structure(tag_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "seed": 1, "return_token_ids": True}
    closing = tag_server.post("/tokenize", prompt="</think>", add_special_tokens=False).json()["tokens"]
    for more in ({"thinking_token_budget": 6}, {"thinking_budget_tokens": 6}):
        choice = {"structured_outputs": {"choice": ["blue"]}, **more}
        [answer] = tag_server.post("/v1/chat/completions", **body, **choice).json()["choices"]
        assert answer["message"]["content"] == "blue"
        # The prompt ends with the tag and a line break, which is the first token of the reasoning.
        assert answer["token_ids"][5:6] == closing
    tool = {"tools": [{"type": "function", "function": READ}], "tool_choice": "required", "thinking_token_budget": 0}
    [answer] = tag_server.post("/v1/chat/completions", **body, **tool).json()["choices"]
    assert answer["token_ids"][:1] == closing
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "read"


def test_budget_may_end_inside_a_character(tag_server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "structured_outputs": {"choice": ["blue"]},
    }
    for seed in range(8):  # the model's tokens are bytes, and its texts are random
        answer = tag_server.post("/v1/chat/completions", **body, seed=seed, thinking_token_budget=4)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "blue"


def test_budget_holds_in_responses_and_completions(tag_server: ServerProcess) -> None:
    fields: dict[str, Any] = {"thinking_token_budget": 4, "seed": 1, "structured_outputs": {"choice": ["blue"]}}
    response = tag_server.post("/v1/responses", input="Hi", max_output_tokens=100, **fields).json()
    assert response["output"][-1]["content"][0]["text"] == "blue"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    fields = {"thinking_token_budget": 4, "seed": 1, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    [closing] = tag_server.post("/tokenize", prompt="</think>", add_special_tokens=False).json()["tokens"]
    for prompt, position in (("Hi<think>", 4), ("Hi<think>abc", 1), ("<think>abcd", 0), ("<think>abc</think>", None)):
        [choice] = tag_server.post("/v1/completions", prompt=prompt, **fields).json()["choices"]
        assert [index for index, token in enumerate(choice["token_ids"]) if token == closing][:1] == (
            [] if position is None else [position]
        )


def test_anthropics_budget_ends_reasoning(server: ServerProcess, tag_server: ServerProcess) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "thinking": thinking}
    thoughts = [
        block["thinking"]
        for block in tag_server.post("/v1/messages", **body).json()["content"]
        if block["type"] == "thinking"
    ]
    assert len("".join(thoughts)) <= 4
    assert server.post("/v1/messages", **body).status_code == 200  # no reasoning is parsed: no budget can be enforced
    refused = tag_server.post("/v1/messages", **{**body, "thinking": {**thinking, "budget_tokens": "x"}})
    assert refused.json()["error"]["param"] == "thinking.budget_tokens"


def test_budget_is_refused_where_no_reasoning_is_parsed(server: ServerProcess, tag_server: ServerProcess) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        refused = server.post(path, thinking_token_budget=3, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thinking_token_budget"
        assert server.post(path, thinking_token_budget=-1, **body).status_code == 200
        wrong = tag_server.post(path, thinking_token_budget=-2, **body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "thinking_token_budget")


def test_reasoning_config_says_why_reasoning_ends(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model", "{{ messages[0].content }}<think>")
    config = json.dumps({"reasoning_end_str": "\nTime is up.\n</think>\n\n"})
    with running_server(model, tmp_path / "log", "--reasoning-config", config) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "thinking_token_budget": 0}
        message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["reasoning"] == "Time is up."
