"""Conversations of agents' clients with a chat template that refuses much of them, in all APIs."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from strandline.text.model_files import STRICT_TEMPLATE
from tests.cpu.server.conftest import save_chat_model
from tests.cpu.server.process import ServerProcess, http_stream, running_server

CALL = "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
MARK = {"cache_control": {"type": "ephemeral"}}
BROKEN = '{"path": "a'


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model whose template refuses system messages that are not the first, and other things."""
    model = save_chat_model(tmp_path_factory.mktemp("strict"), STRICT_TEMPLATE.read_text())
    with running_server(model, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def forced(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}}


# One conversation in each API: a developer's or system message in the middle, and a call whose arguments were cut.


def chat(server: ServerProcess, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", messages=messages, max_tokens=40, **forced("Done."), **more)


def as_messages(server: ServerProcess, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    found: list[dict[str, Any]] = []
    for message in messages:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
        role = message["role"]
        if role == "tool":
            role, blocks = "user", [{"type": "tool_result", "tool_use_id": "c", "content": message["content"]}]
        for call in message.get("tool_calls", ()):
            written = {"invalid_json": call["function"]["arguments"]}
            blocks.append({"type": "tool_use", "id": "c", "name": "read", "input": written})
        found.append({"role": "system" if role == "developer" else role, "content": blocks})
    return server.post("/v1/messages", messages=found, max_tokens=40, **forced("Done."), **more)


def as_responses(server: ServerProcess, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": "c", "output": message["content"]})
            continue
        items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": "c", **call["function"]})
    return server.post("/v1/responses", input=items, max_output_tokens=40, **forced("Done."), **more)


def num_cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(usage["cache_read_input_tokens"] if details is None else details["cached_tokens"])


USER = {"role": "user", "content": "What does the file say? " * 4}
RULE = {"role": "system", "content": "Read before you answer. " * 4}
LATER = {"role": "developer", "content": "It is Friday. " * 4}
BROKEN_CALL = {
    "role": "assistant",
    "content": "I read it.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": BROKEN}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "Nothing. " * 8}
HISTORIES = {
    "two system messages": [RULE, RULE, USER],
    "system message after a question": [RULE, USER, LATER],
    "system message after an answer": [USER, {"role": "assistant", "content": "So."}, LATER, USER],
    "broken call": [RULE, USER, BROKEN_CALL, RESULT],
    "system message after a result": [RULE, USER, BROKEN_CALL, RESULT, LATER],
    "no question": [RULE, LATER],
}


@pytest.mark.parametrize("ask", [chat, as_messages, as_responses])
@pytest.mark.parametrize("name", HISTORIES)
def test_conversations_are_answered_and_hit(
    strict_server: ServerProcess, name: str, ask: Callable[..., httpx.Response]
) -> None:
    salt = f"{name} {ask.__name__}"  # what another API or history has left would be hit
    first = ask(strict_server, HISTORIES[name], cache_salt=salt)
    assert first.status_code == 200, first.text
    usage = first.json()["usage"]
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    num_prompt += usage.get("cache_read_input_tokens", 0)
    answer = {"role": "assistant", "content": "Done."}
    second = ask(strict_server, [*HISTORIES[name], answer, USER], cache_salt=salt)
    assert second.status_code == 200, second.text
    assert num_cached(second.json()) >= num_prompt


# A session of Claude Code.

READ = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}
LATE = {"name": "late", "description": "Is found by a search.", "input_schema": SCHEMA, "defer_loading": True}


def request(turn: int, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a request as Claude Code sends it; its header and marks differ from turn to turn."""
    header = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"
    system: list[dict[str, Any]] = [
        {"type": "text", "text": header},
        {"type": "text", "text": "You are an agent.", **MARK},
        {"type": "text", "text": "Do what is asked. " * 20, **MARK},
    ]
    *earlier, last = messages
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    blocks[-1] = {**blocks[-1], **MARK}
    return {
        "max_tokens": 300,
        "system": system,
        "tools": [READ, LATE],
        "messages": [*earlier, {**last, "content": blocks}],
        "thinking": {"type": "adaptive", "display": "updates"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "{}"},
        **more,
    }


def result(call: dict[str, Any], content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": content, **more}]}


def test_turns_of_claude_code_hit_all_of_the_last(strict_server: ServerProcess) -> None:
    reminder = {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [reminder, {"type": "text", "text": "What does a.py say?"}]},
        {"role": "system", "content": "Agents: none. " * 8},
    ]
    follow_ups: list[Callable[[dict[str, Any]], list[dict[str, Any]]]] = [
        lambda call: [result(call, [{"type": "text", "text": "print(1)"}])],
        lambda call: [result(call, [{"type": "tool_reference", "tool_name": "late"}])],
        lambda call: [result(call, "No such file.", is_error=True), {"role": "system", "content": "It is late."}],
        lambda call: [{"role": "user", "content": "Thanks. And b.py?"}, {"role": "system", "content": "Still late."}],
        lambda call: [],
    ]
    computed = 0
    for turn, follow_up in enumerate(follow_ups):
        answer_text = f"Step {turn}." if turn == 3 else f"Step {turn}.\n\n{CALL}"
        body = request(turn, messages)
        counted = strict_server.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
        response = strict_server.post("/v1/messages", **body, **forced(answer_text))
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= computed
        computed = counted + usage["output_tokens"] - 1  # the end of the turn is not computed
        messages = [*messages, {"role": "assistant", "content": answer["content"]}, *follow_up(answer["content"][-1])]


def test_another_session_hits_tools_and_system_prompt(strict_server: ServerProcess) -> None:
    long = strict_server.post("/v1/messages", **request(77, [{"role": "user", "content": "One?"}])).json()["usage"]
    short = strict_server.post("/v1/messages", **request(78, [{"role": "user", "content": "Two?"}])).json()["usage"]
    assert short["cache_read_input_tokens"] >= long["input_tokens"] + long["cache_read_input_tokens"] - 60


def test_deferred_tools_cost_nothing(strict_server: ServerProcess) -> None:
    body = request(0, [{"role": "user", "content": "Hi"}])
    with_deferred = strict_server.post("/v1/messages/count_tokens", **body).json()
    without = strict_server.post("/v1/messages/count_tokens", **{**body, "tools": [READ]}).json()
    assert with_deferred == without
    call = CALL.replace("=read", "=late")
    answer = strict_server.post("/v1/messages", **body, **forced(call)).json()
    assert [block.get("name") for block in answer["content"]] == ["late"]


def test_telemetry_is_logged_once(strict_server: ServerProcess) -> None:
    for turn in range(2):
        strict_server.post("/v1/messages/count_tokens", **request(turn, [{"role": "user", "content": "Hi"}]))
    assert strict_server.log().count("x-anthropic-billing-header is left out") == 1


def test_too_long_prompts_are_refused_in_anthropics_words(strict_server: ServerProcess) -> None:
    limit = strict_server.get("/v1/models").json()["data"][0]["max_model_len"]
    messages = [{"role": "user", "content": "x" * limit}]
    counted = strict_server.post("/v1/messages/count_tokens", messages=messages).json()["input_tokens"]
    error = strict_server.post("/v1/messages", messages=messages, max_tokens=1).json()["error"]
    assert error["message"] == f"prompt is too long: {counted} tokens > {limit - 1} maximum"


def test_head_of_the_root_is_answered(strict_server: ServerProcess) -> None:
    assert httpx.head(strict_server.url).status_code == 200


# Continuation of the last message.

BEGUN = [USER, {"role": "assistant", "content": "The answer"}]


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [USER, {**BEGUN[1], "prefix": True}]},
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_chat_continues_the_last_message(strict_server: ServerProcess, more: dict[str, Any]) -> None:
    body = {"max_tokens": 40, **forced(" is 42."), **more}
    answer = strict_server.post("/v1/chat/completions", **body).json()
    assert answer["choices"][0]["message"]["content"] == " is 42."
    counted = strict_server.post("/tokenize", messages=BEGUN, add_generation_prompt=False, continue_final_message=True)
    text = strict_server.post("/detokenize", tokens=counted.json()["tokens"]).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nThe answer")
    assert answer["usage"]["prompt_tokens"] == counted.json()["count"]
    again = strict_server.post("/v1/chat/completions", **body, echo=True).json()
    assert again["choices"][0]["message"]["content"] == "The answer is 42."
    done = {"role": "assistant", "content": "The answer is 42."}
    later = strict_server.post("/v1/chat/completions", messages=[USER, done, USER], max_tokens=1).json()
    assert num_cached(later) >= answer["usage"]["total_tokens"] - 1


def test_echo_begins_streams(strict_server: ServerProcess) -> None:
    body = {"messages": [USER, {**BEGUN[1], "prefix": True}], "stream": True, "echo": True, "max_tokens": 40, "n": 2}
    with http_stream("POST", f"{strict_server.url}/v1/chat/completions", json={**body, **forced(" is.")}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    for index in range(2):
        text = "".join(each["delta"].get("content") or "" for each in choices if each["index"] == index)
        assert text == "The answer is."


def test_continuation_excludes_a_new_message(strict_server: ServerProcess) -> None:
    error = strict_server.post("/v1/chat/completions", messages=BEGUN, continue_final_message=True).json()["error"]
    assert error["param"] == "continue_final_message"


def test_messages_continue_the_last_answer(strict_server: ServerProcess) -> None:
    body = {"messages": BEGUN, "max_tokens": 40}
    answer = strict_server.post("/v1/messages", **body, **forced(" is 42.")).json()
    assert answer["content"] == [{"type": "text", "text": " is 42."}]
    for thinking, content, reason in (
        ({"type": "disabled"}, "The answer ", "cannot end with trailing whitespace"),
        ({"type": "enabled", "budget_tokens": 1024}, "The answer", "with thinking enabled"),
    ):
        messages = [USER, {"role": "assistant", "content": content}]
        error = strict_server.post("/v1/messages", messages=messages, max_tokens=40, thinking=thinking).json()["error"]
        assert error["message"].startswith("messages.1: ")
        assert reason in error["message"]


def test_open_reasoning_is_continued(strict_server: ServerProcess) -> None:
    begun = {"role": "assistant", "content": "<think>\nI w", "prefix": True}
    text = "as.\n</think>\n\nSo."
    body = {"messages": [USER, begun], "max_tokens": 60, "structured_outputs": {"choice": [text]}}
    message = strict_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["reasoning"]
    assert text.partition("\n")[0] not in (message["content"] or "")
