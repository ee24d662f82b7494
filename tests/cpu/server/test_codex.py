"""Requests of the shape that Codex sends to ``/v1/responses``, and what it needs in the responses."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from strandline.text.model_files import STRICT_TEMPLATE
from tests.cpu.server.conftest import save_chat_model
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

LARK = 'start: "*** Begin Patch\\n" line+ "*** End Patch"\nline: /[+-]([a-z]*)/ "\\n"\n'
PATCH = "*** Begin Patch\n+a\n-b\n*** End Patch"
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
WAIT = {**SHELL, "name": "wait_agent", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}
TOOLS: list[dict[str, Any]] = [
    SHELL,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [WAIT]},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
    },
    {"type": "web_search", "external_web_access": False},
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "number"}}},
    },
]
INPUT: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
    {
        "type": "message",
        "role": "developer",
        "content": [
            {"type": "input_text", "text": "Sandbox: read-only."},
            {"type": "input_text", "text": "No network."},
        ],
    },
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "<environment_context>2026-11-27</environment_context>"}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in main.py?"}]},
]
FIELDS: dict[str, Any] = {
    "model": "tiny",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}},
}
SPAWN = {
    **SHELL,
    "name": "spawn_agent",
    "defer_loading": True,
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
}
THOUGHT = "<think>\nhm\n</think>\n\n"
ANSWERS = [
    THOUGHT
    + "<tool_call>\n<function=exec_command>\n<parameter=cmd>\ncat main.py\n</parameter>\n</function>\n</tool_call>",
    THOUGHT + "<tool_call>\n<function=multi_agent_v1__wait_agent>\n<parameter=id>\na\n</parameter>\n</function>\n"
    "</tool_call>",
    THOUGHT
    + f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{PATCH}\n</parameter>\n</function>\n</tool_call>",
    THOUGHT + "<tool_call>\n<function=tool_search>\n<parameter=query>\nagents\n</parameter>\n</function>\n</tool_call>",
    THOUGHT
    + "<tool_call>\n<function=found__spawn_agent>\n<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>",
    THOUGHT + "Done.",
]


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = save_chat_model(tmp_path_factory.mktemp("strict"), STRICT_TEMPLATE.read_text())
    with running_server(model, tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture
def codex(strict_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def stream(client: openai.OpenAI, history: list[Any], answer: str | None, **more: Any) -> Any:
    """Return the response that a stream ends with."""
    fields = {**FIELDS, "input": history, **more}
    if answer is not None:
        forced = {"structured_outputs": {"grammar": f"start: {json.dumps(answer)}"}}
        fields["extra_body"] = {**fields["extra_body"], **forced}
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed", events[-1]
    return events[-1].response


def sent_back(item: Any) -> dict[str, Any]:
    """Return an item of a response as Codex sends it back: without the status, and with encrypted reasoning."""
    fields: dict[str, Any] = item.model_dump(exclude_none=True)
    del fields["status"]
    return {**fields, "content": None} if item.type == "reasoning" else fields


def result_of(call: Any) -> dict[str, Any]:
    """Return the result of a call, in Codex's form."""
    if call.type == "tool_search_call":
        found = {"type": "namespace", "name": "found", "description": "F.", "tools": [SPAWN]}
        return {
            "type": "tool_search_output",
            "call_id": call.call_id,
            "status": "completed",
            "execution": "client",
            "tools": [found],
        }
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": "ok"}


def test_each_turn_hits_all_of_the_last_one(codex: openai.OpenAI) -> None:
    history = [*INPUT]
    computed = 0
    calls = []
    for answer in ANSWERS:
        response = stream(codex, history, answer)
        usage = response.usage
        assert usage.input_tokens_details.cached_tokens >= computed
        computed = usage.input_tokens + usage.output_tokens - 1  # the end token has no state
        for item in response.output:
            history.append(sent_back(item))
            if item.type.endswith("_call"):
                calls.append(item)
                history.append(result_of(item))
    shell, wait, patch, search, spawn = calls
    assert (shell.type, shell.name, json.loads(shell.arguments)) == (
        "function_call",
        "exec_command",
        {"cmd": "cat main.py"},
    )
    assert (wait.type, wait.name, wait.namespace) == ("function_call", "wait_agent", "multi_agent_v1")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"query": "agents"})
    assert (spawn.name, spawn.namespace, json.loads(spawn.arguments)) == ("spawn_agent", "found", {"count": 2})
    assert [item.id.split("_")[0] for item in calls] == ["fc", "fc", "ctc", "tsc", "fc"]
    assert response.output_text == "Done."


def test_session_continues_after_a_late_developer_message(codex: openai.OpenAI) -> None:
    first = stream(codex, INPUT, THOUGHT + "print.")
    later = {**INPUT[0], "content": [{"type": "input_text", "text": "Sandbox: off."}]}
    response = stream(codex, [*INPUT, *map(sent_back, first.output), later, INPUT[3]], THOUGHT + "Done.")
    assert response.output_text == "Done."
    assert response.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 30


def test_a_picture_in_a_result_does_not_end_the_session(codex: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": '{"path": "a.png"}'}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    history = [*INPUT, call, {"type": "function_call_output", "call_id": "c", "output": [picture]}]
    assert stream(codex, history, THOUGHT + "Done.").output_text == "Done."


def test_openais_reader_of_streams_puts_custom_calls_together(codex: openai.OpenAI) -> None:
    forced = {"structured_outputs": {"grammar": f"start: {json.dumps(ANSWERS[2])}"}}
    with codex.responses.stream(**{**FIELDS, "extra_body": forced}, input=INPUT) as events:
        pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        [call] = [item for item in events.get_final_response().output if item.type == "custom_tool_call"]
    assert "".join(pieces) == call.input == PATCH
    assert len(pieces) > 5


def test_a_required_custom_call_follows_its_grammar(codex: openai.OpenAI) -> None:
    wishes = {**FIELDS, "reasoning": {"effort": "none"}, "parallel_tool_calls": False, "temperature": 1.0}
    grammar = 'start: "<" /[ab]{3}/ ">"'
    tool = {**TOOLS[2], "format": {"type": "grammar", "syntax": "lark", "definition": grammar}}
    choice = {"type": "custom", "name": "apply_patch"}
    [call] = codex.responses.create(**{**wishes, "tools": [tool], "tool_choice": choice}, input=INPUT).output
    assert call.type == "custom_tool_call"
    assert len(call.input) == 5
    assert set(call.input[1:4]) <= {"a", "b"}
    tool["format"] = {"type": "grammar", "syntax": "regex", "definition": "a/[0-9]{2}"}
    [call] = codex.responses.create(**{**wishes, "tools": [tool], "tool_choice": choice}, input=INPUT).output
    assert call.type == "custom_tool_call"
    assert call.input[:2] == "a/"
    assert call.input[2:].isdigit()


def test_a_grammar_that_does_not_compile_is_left_out(codex: openai.OpenAI) -> None:
    tool = {**TOOLS[2], "format": {"type": "grammar", "syntax": "lark", "definition": 'start: ("a"'}}
    wishes = {**FIELDS, "tools": [tool], "reasoning": {"effort": "none"}, "max_output_tokens": 60}
    [call] = codex.responses.create(**{**wishes, "tool_choice": "required"}, input=INPUT).output
    assert call.type == "custom_tool_call"


def test_a_probe_is_answered(codex: openai.OpenAI) -> None:
    response = codex.responses.create(model="tiny", input=[], max_output_tokens=1)
    assert response.status == "incomplete"
