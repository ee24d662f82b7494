"""Input items and tools of the Responses API as chat messages and functions."""

import base64
import json
from itertools import pairwise
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.server.requests.text_logprobs import TextLogprobs
from strandline.server.responses.custom_input import CustomInput
from strandline.server.responses.history import History
from strandline.server.responses.items import Items
from strandline.server.responses.reasoning_seal import ReasoningSeal
from strandline.server.responses.tools import DeclaredTools, ToolName
from strandline.text.segments import Segment, SegmentKind

LEFT_OUT = "[image left out: this model reads text only]"
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
ASKED = {"role": "user", "content": "hi"}


def read(*items: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    declared = DeclaredTools()
    declared.add(tools or [], "tools")
    return History(declared).read(None, [ASKED, *items])[1:]


def called(name: str, arguments: str, call_id: str = "c") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: str, call_id: str = "c") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SHELL = {"type": "exec", "command": ["ls"]}
PATCH = {"type": "delete_file", "path": "a"}
TEXT_FILE = "data:text/plain;base64," + base64.b64encode("für".encode()).decode()
ITEMS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
        [called("n__f", "{}")],
    ),
    ({"type": "custom_tool_call", "call_id": "c", "name": "p", "input": 'ü"'}, [called("p", '{"input": "ü\\""}')]),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "y"}, [result("y")]),
    (
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}, PICTURE]},
        [result(f"y\n{LEFT_OUT}")],
    ),
    ({"type": "local_shell_call", "call_id": "c", "action": SHELL}, [called("local_shell", json.dumps(SHELL))]),
    ({"type": "local_shell_call_output", "id": "c", "output": "a"}, [result("a")]),
    (
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
        [called("shell", '{"commands": ["ls"]}')],
    ),
    (
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        [result('{"stdout": "a", "stderr": ""}')],
    ),
    ({"type": "apply_patch_call", "call_id": "c", "operation": PATCH}, [called("apply_patch", json.dumps(PATCH))]),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "ok"}, [result("ok")]),
    (
        {"type": "apply_patch_call_output", "id": "o", "call_id": "c", "status": "failed", "output": None},
        [result('{"status": "failed"}')],
    ),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "wait"}}, [called("computer", '{"type": "wait"}')]),
    (
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "x"}},
        [result(LEFT_OUT)],
    ),
    (
        {"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": "{}", "output": "y"},
        [called("f", "{}"), result("y")],
    ),
    (
        {"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "y"}]},
        [called("code_interpreter", '{"code": "1"}'), result('{"type": "logs", "logs": "y"}')],
    ),
    (
        {"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"text": "y", "filename": "a"}]},
        [called("file_search", '{"queries": ["q"]}'), result('{"text": "y", "filename": "a"}')],
    ),
    (
        {"type": "web_search_call", "id": "c", "status": "completed", "action": {"type": "search", "query": "q"}},
        [{"role": "assistant", "content": '[web_search_call: {"action": {"type": "search", "query": "q"}}]'}],
    ),
    (
        {"type": "image_generation_call", "id": "c", "revised_prompt": "a cat", "result": "iVBO" * 200},
        [
            {
                "role": "assistant",
                "content": '[image_generation_call: {"revised_prompt": "a cat", "result": "[data left out: this model '
                'reads text only]"}]',
            }
        ],
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        [{"role": "user", "content": '[mcp_approval_response: {"approval_request_id": "a", "approve": true}]'}],
    ),
    ({"type": "compaction", "encrypted_content": "x", "summary": "We met."}, [{"role": "user", "content": "We met."}]),
    (
        {"type": "compaction_summary", "encrypted_content": "x"},
        [{"role": "user", "content": "[The summary of the earlier conversation is encrypted, and cannot be read.]"}],
    ),
    ({"type": "reasoning", "summary": [], "content": None}, []),
    (
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        [{"role": "assistant", "content": "", "reasoning_content": "hm"}],
    ),
    ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}, []),
    (
        {
            "type": "message",
            "role": "assistant",
            "phase": "final",
            "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}],
        },
        [{"role": "assistant", "content": "a\nno"}],
    ),
    ({"role": "developer", "content": [{"type": "input_text", "text": "B"}]}, [{"role": "system", "content": "B"}]),
    (
        {"role": "user", "content": [PICTURE, {"type": "input_text", "text": "what?"}]},
        [{"role": "user", "content": [{"type": "text", "text": LEFT_OUT}, {"type": "text", "text": "what?"}]}],
    ),
    (
        {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": TEXT_FILE}]},
        [{"role": "user", "content": [{"type": "text", "text": "[file a.txt]\nfür"}]}],
    ),
    (
        {"role": "user", "content": [{"type": "input_file", "filename": "a.pdf", "file_data": "data:x;base64,AA=="}]},
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "[file a.pdf left out: this model reads text only]"}],
            }
        ],
    ),
    (
        {"type": "tea_call", "call_id": "c", "arguments": '{"hot": true}', "status": "completed"},
        [called("tea", '{"hot": true}')],
    ),
    ({"type": "tea_call_output", "call_id": "c", "output": {"cups": 2}}, [result('{"cups": 2}')]),
    (
        {"type": "agent_message", "author": "/root", "content": [{"type": "input_text", "text": "y"}]},
        [{"role": "user", "content": "[/root]\ny"}],
    ),
    (
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
        [called("tool_search", '{"query": "q"}')],
    ),
    ({"type": "mood", "id": "m", "mood": "fine"}, [{"role": "assistant", "content": '[mood: {"mood": "fine"}]'}]),
]


@pytest.mark.parametrize(("item", "messages"), ITEMS)
def test_every_kind_of_item_is_rendered(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert read(item) == messages


def test_items_of_one_turn_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See."}]}
    [message] = read(thought, said, call, {**call, "call_id": "d"})
    assert (message["reasoning_content"], message["content"]) == ("hm", "See.")
    assert [each["id"] for each in message["tool_calls"]] == ["c", "d"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
    ({"role": "user", "content": {"type": "input_text", "text": "x"}}, "input[1].content"),
    ({"role": "narrator", "content": "x"}, "input[1].role"),
    ({"type": "function_call", "call_id": "c", "name": "f"}, "input[1].arguments"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "namespace": 5}, "input[1].namespace"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {}}, "input[1].input"),
    ({"type": "function_call_output", "output": "x"}, "input[1].call_id"),
    ({"type": "function_call_output", "call_id": "c"}, "input[1].output"),
    ({"type": "message", "content": "x"}, "input[1].role"),
    ({"type": "additional_tools", "tools": [{"type": "function", "name": ""}]}, "input[1].tools[0].name"),
    ({"type": 5}, "input[1]"),
]


@pytest.mark.parametrize(("item", "path"), WRONG)
def test_errors_name_the_items_own_path(item: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as error:
        read(item)
    assert error.value.param == path
    assert str(error.value).startswith(path)


PLAIN = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}


def declared(*tools: dict[str, Any]) -> DeclaredTools:
    found = DeclaredTools()
    found.add(tools, "tools")
    return found


def names(tools: DeclaredTools) -> list[str]:
    return [function["function"]["name"] for function in tools.functions]


def test_tools_are_declared_as_functions() -> None:
    space = {"type": "namespace", "name": "n", "description": "N.", "tools": [PLAIN, {**PLAIN, "name": "g"}, CUSTOM]}
    tools = declared(PLAIN, space, {**CUSTOM, "format": GRAMMAR}, {"type": "web_search", "external_web_access": False})
    assert names(tools) == ["f", "n__f", "n__g", "n__patch", "patch"]
    assert [tools.tool(name) for name in ("f", "n__f", "n__patch", "unknown")] == [
        ToolName("function", "f"),
        ToolName("function", "f", "n"),
        ToolName("custom", "patch", "n"),
        ToolName("function", "unknown"),
    ]
    assert [function["function"].get("description") for function in tools.functions[:3]] == [None, "N.", None]
    custom = tools.functions[-1]["function"]
    assert custom["description"].startswith("Edits.")
    assert custom["description"].endswith('start: "a"+')
    assert custom["parameters"]["required"] == ["input"]
    assert tools.hosted == ["web_search"]


@pytest.mark.parametrize("kind", ["image_generation", "tool_search", "mcp", "local_shell", "shell", "computer", "tea"])
def test_tools_that_run_elsewhere_are_left_out(kind: str) -> None:
    assert names(declared({"type": kind, "name": "x"}, PLAIN)) == ["f"]
    space = {"type": "namespace", "name": "n", "tools": [{"type": kind}, {"type": "namespace", "name": "m"}]}
    assert names(declared(space)) == []


def test_earlier_call_has_the_name_that_the_model_wrote() -> None:
    space = {"type": "namespace", "name": "mcp__files__", "tools": [PLAIN, {**PLAIN, "name": "f" * 300}]}
    for tools in ([space], []):
        for name in ("f", "f" * 300):
            call = {"type": "function_call", "call_id": "c", "namespace": "mcp__files__", "arguments": "{}"}
            [message] = read({**call, "name": name}, tools=tools)
            assert message["tool_calls"][0]["function"]["name"] in names(declared(space))
    assert names(declared(space))[0] == "mcp__files__f"
    assert len(names(declared(space))[1]) == 128
    assert names(declared({**space, "name": "my-files"}))[0] == "my_files__f"


def test_tools_with_one_joint_name_are_distinguished() -> None:
    space = {"type": "namespace", "name": "n", "tools": [PLAIN]}
    tools = declared({**PLAIN, "name": "n__f"}, space, {**CUSTOM, "name": "n__f"})
    assert len(set(names(tools))) == 3
    assert [tools.tool(name) for name in names(tools)] == [
        ToolName("function", "n__f"),
        ToolName("function", "f", "n"),
        ToolName("custom", "n__f"),
    ]
    for name in names(tools):
        assert tools.function(tools.tool(name)) == name


def test_namespace_may_be_missing_if_the_name_is_unique() -> None:
    tools = declared(PLAIN, {"type": "namespace", "name": "n", "tools": [PLAIN, {**PLAIN, "name": "g"}]})
    assert tools.tool("g") == ToolName("function", "g", "n")
    assert tools.tool("f") == ToolName("function", "f")
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    for name, function in (("g", "n__g"), ("f", "f"), ("h", "h")):
        history = History(tools).read(None, [ASKED, {**call, "name": name}])
        assert history[1]["tool_calls"][0]["function"]["name"] == function


def test_choices_name_tools_as_the_client_does() -> None:
    space = {"type": "namespace", "name": "n", "tools": [{**PLAIN, "name": "g"}]}
    tools = declared(PLAIN, space, CUSTOM, {"type": "web_search"})

    def allowed(choice: Any) -> tuple[str, set[str] | None]:
        box = tools.toolbox(choice, is_parallel=True)
        return box.choice, None if box.allowed is None else set(box.allowed)

    assert allowed("auto") == ("auto", None)
    assert allowed({"type": "function", "name": "g", "namespace": "n"}) == ("named", {"n__g"})
    assert allowed({"type": "function", "name": "g"}) == ("named", {"n__g"})
    assert allowed({"type": "custom", "name": "patch"}) == ("named", {"patch"})
    chosen = [{"type": "function", "name": "f"}, {"type": "namespace", "name": "n"}, {"type": "web_search"}]
    assert allowed({"type": "allowed_tools", "mode": "required", "tools": chosen}) == ("required", {"f", "n__g"})
    assert allowed({"type": "allowed_tools", "mode": "auto", "tools": chosen[2:]}) == ("none", None)
    for wrong in (
        {"type": "function", "name": "h"},
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": chosen[2:]},
        {"type": "allowed_tools", "mode": "never", "tools": chosen},
        {"type": "function"},
        "sometimes",
    ):
        with pytest.raises(RequestError) as error:
            tools.toolbox(wrong, is_parallel=True)
        assert error.value.param == "tool_choice"


def test_tools_declared_in_the_conversation_may_be_called() -> None:
    tools = declared(PLAIN)
    space = {"type": "namespace", "name": "n", "tools": [{**PLAIN, "name": "g"}]}
    items = [ASKED, {"type": "additional_tools", "tools": [space]}]
    message = History(tools).read(None, items)[-1]
    assert message["role"] == "system"
    assert '"n__g"' in message["content"]
    box = tools.toolbox("auto", is_parallel=True)
    assert [tool["function"]["name"] for tool in box.tools] == ["f"]
    assert set(box.schemas or ()) == {"f", "n__g"}
    History(tools).read(None, items * 2000)
    assert tools.toolbox("auto", is_parallel=True).later_tools == box.later_tools


def test_long_histories_are_read_in_linear_time() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "x" * 40}
    more = {"type": "additional_tools", "tools": [PLAIN]}
    for item in (call, said, more, {"role": "developer", "content": "x" * 40}):
        start = process_time()
        History(DeclaredTools()).read(None, [item] * 40_000)
        assert process_time() - start < 10  # a second; with copies of all that came before, it would be minutes


def test_the_number_of_tools_is_limited() -> None:
    tools = [{**PLAIN, "name": f"f{number}"} for number in range(1024)]
    assert len(declared(*tools).functions) == 1024
    with pytest.raises(RequestError, match="at most 1024 tools"):
        History(declared(*tools)).read(None, [{"type": "additional_tools", "tools": [CUSTOM]}])


@given(st.text(), st.lists(st.integers(0, 400)), st.booleans())
def test_custom_input_does_not_depend_on_the_pieces(text: str, cuts: list[int], is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    places = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    reader = CustomInput()
    pieces = [reader.feed(arguments[start:end]) for start, end in pairwise(places)]
    assert "".join([*pieces, reader.finish()]) == text


@given(st.text(alphabet='{}":\\u0dDnpit Z', max_size=40))
def test_custom_input_is_valid_text_whatever_the_arguments(rest: str) -> None:
    for arguments in (rest, '{"input": "' + rest):
        reader = CustomInput()
        text = "".join([*map(reader.feed, arguments), reader.finish()])
        assert text.encode().decode() == text


@pytest.mark.parametrize(("arguments", "text"), [('{"patch": "a"}', "a"), ('"a"', "a"), ("{a}", "{a}"), ("", "")])
def test_other_arguments_of_a_custom_tool_are_its_input(arguments: str, text: str) -> None:
    reader = CustomInput()
    assert reader.feed(arguments) + reader.finish() == text


def test_a_custom_call_has_its_own_item_and_events() -> None:
    items = Items(declared({"type": "namespace", "name": "n", "tools": [CUSTOM]}).tool, TextLogprobs(0))
    events = items.append([Segment(SegmentKind.CALL, "n__patch")])
    for piece in ('{"inp', 'ut": "a\\', 'nb"}'):
        events += items.append([Segment(SegmentKind.ARGUMENTS, piece)])
    events += items.finish("completed")
    kinds = ["output_item.added", *["custom_tool_call_input.delta"] * 2, "custom_tool_call_input.done"]
    assert [event["type"] for event in events] == [f"response.{kind}" for kind in [*kinds, "output_item.done"]]
    assert [event["delta"] for event in events[1:3]] == ["a", "\nb"]
    [item] = items.items
    assert (item["type"], item["name"], item["namespace"], item["input"]) == ("custom_tool_call", "patch", "n", "a\nb")
    assert item["id"].startswith("ctc_")


@given(st.text())
def test_sealed_reasoning_is_read_by_its_owner_alone(text: str) -> None:
    sealed = ReasoningSeal("a").seal(text)
    assert ReasoningSeal("a").unseal(sealed) == text
    assert ReasoningSeal("b").unseal(sealed) is None
    for other in (
        sealed[:-3] + "AAA" if not sealed.endswith("AAA") else sealed[:-3] + "BBB",
        "gAAAAA",
        "sl1.§",
        "sl1.",
    ):
        assert ReasoningSeal("a").unseal(other) is None


def test_sealed_reasoning_replaces_missing_content() -> None:
    seal = ReasoningSeal("")
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal.seal("hm")}
    [_, message] = History(DeclaredTools(), seal.unseal).read(None, [ASKED, item])
    assert message["reasoning_content"] == "hm"
