"""Anthropic's blocks and tools as messages and functions, without a server."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import RequestError
from strandline.server.messages.content import BlockTexts
from strandline.server.messages.history import read_history
from strandline.server.messages.tools import read_tools

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}}}
MARK = {"cache_control": {"type": "ephemeral"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
ANSWER = {"role": "assistant", "content": "a"}
REFUSAL = "this model reads text only"


def history(*messages: dict[str, Any], system: Any = None, tools: Any = ()) -> list[dict[str, Any]]:
    return read_history(system, messages, BlockTexts(read_tools(tools).definitions)).messages


def text_of(block: dict[str, Any], tools: Any = ()) -> str:
    [message, _] = history({"role": "user", "content": [block]}, ANSWER, tools=tools)
    return "\n".join(part["text"] for part in message["content"])


TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "search result": (
        {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "y"}]},
        "<search_result>\nt\nu\ny\n</search_result>",
    ),
    "text document": (
        {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "y"}},
        "<document>\nt\ny\n</document>",
    ),
    "document of blocks": (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "y"}]}},
        "<document>\ny\n</document>",
    ),
    "unknown source": (
        {"type": "document", "source": {"type": "tape"}},
        '<document>\n{"source": {"type": "tape"}}\n</document>',
    ),
    "earlier document": (PDF, f"<document>\n[document left out: {REFUSAL}]\n</document>"),
    "earlier image": (PICTURE, f"[image left out: {REFUSAL}]"),
    "compaction": ({"type": "compaction", "content": "So far."}, "So far."),
    "empty compaction": ({"type": "compaction", "content": None}, ""),
    "server's call": (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        '<server_tool_use>\n{"id": "s", "name": "web_search", "input": {"query": "q"}}\n</server_tool_use>',
    ),
    "server's result": (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "xx"}],
        },
        '<web_search_tool_result>\n{"tool_use_id": "s", "content": [{"type": "web_search_result", "title": "t", '
        '"url": "u"}]}\n</web_search_tool_result>',
    ),
    "upload": (
        {"type": "container_upload", "file_id": "x"},
        '<container_upload>\n{"file_id": "x"}\n</container_upload>',
    ),
    "of the future": ({"type": "dream", "of": ["sheep"]}, '<dream>\n{"of": ["sheep"]}\n</dream>'),
    "unknown tool": ({"type": "tool_reference", "tool_name": "g"}, "[the tool g is not available]"),
    "removal": ({"type": "tool_removal", "tool": {"name": "f"}}, "[the tool f is no longer available]"),
    "null text": ({"type": "text", "text": None}, ""),
    "opaque thought": ({"type": "redacted_thinking", "data": "xx"}, ""),
}


@pytest.mark.parametrize("name", TEXTS)
def test_blocks_are_text(name: str) -> None:
    block, expected = TEXTS[name]
    assert text_of(block) == expected


def test_references_and_additions_are_definitions() -> None:
    function = {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    expected = "<tools>\n" + json.dumps({"type": "function", "function": function}) + "\n</tools>"
    deferred = {**TOOL, "defer_loading": True}
    assert text_of({"type": "tool_reference", "tool_name": "f"}, [deferred]) == expected
    assert text_of({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}, [deferred]) == expected
    texts = BlockTexts({})
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}
    [message] = read_history(None, [{"role": "system", "content": [added]}], texts).messages
    assert message["content"][0]["text"] == expected
    box = read_tools(None).toolbox(None, texts.added)
    assert not box.tools
    assert box.schemas == {"f": TOOL["input_schema"]}


def test_results_hold_blocks_and_say_that_they_are_errors() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [PICTURE, {"type": "text", "text": "y"}]}
    [first, second, _] = history(
        {"role": "user", "content": [{"type": "text", "text": "z"}, {**result, "is_error": True, **MARK}]}, ANSWER
    )
    assert first["role"] == "tool"
    assert [part["text"] for part in first["content"]] == ["Error:", f"[image left out: {REFUSAL}]", "y"]
    assert first["cache_control"] == MARK["cache_control"]
    assert second["content"] == [{"type": "text", "text": "z"}]


NEWEST: dict[str, tuple[list[Any], str]] = {
    "image": ([PICTURE], "messages.2.content.0.image"),
    "document": ([{"type": "text", "text": "x"}, PDF], "messages.2.content.1.document"),
    "image in a result": (
        [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}, PICTURE]}],
        "messages.2.content.0.tool_result.content.1.image",
    ),
    "document in a result": (
        [{"type": "tool_result", "tool_use_id": "c", "content": [PDF]}],
        "messages.2.content.0.tool_result.content.0.document",
    ),
}


@pytest.mark.parametrize("name", NEWEST)
def test_media_of_the_newest_turn_is_refused_by_path(name: str) -> None:
    blocks, path = NEWEST[name]
    messages = [{"role": "user", "content": "q"}, ANSWER, {"role": "user", "content": blocks}]
    with pytest.raises(RequestError, match=f"^{path}: {REFUSAL}$"):
        history(*messages, {"role": "system", "content": "later"}, system="s")
    assert history(*messages, ANSWER)
    assert history(*messages, {"role": "user", "content": "Go on."})


WRONG: dict[str, tuple[Any, str]] = {
    "no type": ({"text": "x"}, "messages.0.content.1: a content block must be"),
    "no object": ("x", "messages.0.content.1: a content block must be"),
    "text": ({"type": "text", "text": 3}, "messages.0.content.1: the text of a block"),
    "call": ({"type": "tool_use", "id": "c", "input": {}}, "messages.0.content.1: a tool_use needs"),
    "input": ({"type": "tool_use", "id": "c", "name": "f", "input": 3}, "messages.0.content.1: a tool_use needs"),
    "result": ({"type": "tool_result", "content": "x"}, "messages.0.content.1: a tool_result needs"),
    "content": ({"type": "tool_result", "tool_use_id": "c", "content": 3}, "messages.0.content.1.tool_result: content"),
    "source": ({"type": "document"}, "messages.0.content.1: a document needs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_malformed_blocks_are_refused_by_path(name: str) -> None:
    block, message = WRONG[name]
    with pytest.raises(RequestError, match=f"^{message}"):
        history({"role": "user", "content": [{"type": "text", "text": "x"}, block]})


def test_empty_texts_leave_their_marks() -> None:
    blocks = [{"type": "text", "text": "x"}, {"type": "text", "text": "", **MARK}]
    [with_mark] = history({"role": "user", "content": blocks})
    [without] = history({"role": "user", "content": [blocks[0], {"type": "text", "text": ""}]})
    assert with_mark["content"] == [{"type": "text", "text": "x", **MARK}]
    assert without["content"] == [{"type": "text", "text": "x"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "source", "tool", "name", "data", "title"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    [
        "text",
        "image",
        "document",
        "search_result",
        "tool_use",
        "tool_result",
        "tool_reference",
        "tool_addition",
        "thinking",
        "mcp_tool_use",
        "compaction",
        "x",
    ]
)


@given(
    block=st.dictionaries(
        st.sampled_from(["text", "content", "source", "tool", "name", "id", "input", "title", "tool_use_id"]), JSON
    ),
    kind=KINDS,
)
def test_no_block_does_more_than_be_refused(block: dict[str, Any], kind: str) -> None:
    with suppress(RequestError):
        history({"role": "user", "content": [{"type": kind, **block}]}, ANSWER)


# Tools


def test_tools_that_run_elsewhere_are_left_out() -> None:
    hosted = [
        {"type": kind, "name": kind} for kind in ("web_search_20250305", "code_execution_20250825", "computer_20250124")
    ]
    tools = read_tools([*hosted, {"type": "mcp_toolset", "mcp_server_name": "s"}, TOOL])
    assert [tool["function"]["name"] for tool in tools.listed] == ["f"]
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, None):
        assert len(tools.toolbox(choice, ()).tools) == 1
    with pytest.raises(RequestError, match="runs on Anthropic's servers"):
        tools.toolbox({"type": "tool", "name": "web_search_20250305"}, ())
    with pytest.raises(RequestError, match="runs on Anthropic's servers"):
        read_tools(hosted).toolbox({"type": "any"}, ())
    assert read_tools(hosted).toolbox({"type": "auto"}, ()).schemas is None


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("text_editor_20241022", "str_replace_editor", "view_range"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
def test_tools_that_clients_run_have_schemas(kind: str, name: str, parameter: str) -> None:
    [tool] = read_tools([{"type": kind, "name": name, **MARK}]).listed
    assert tool["function"]["name"] == name
    assert parameter in tool["function"]["parameters"]["properties"]
    assert tool["cache_control"] == MARK["cache_control"]


def test_deferred_tools_are_known_but_not_listed() -> None:
    tools = read_tools([TOOL, {**TOOL, "name": "g", "defer_loading": True}])
    box = tools.toolbox(None, ())
    assert [tool["function"]["name"] for tool in box.tools] == ["f"]
    assert set(box.schemas or ()) == {"f", "g"}


def test_deferred_tools_are_listed_if_the_search_is_hosted() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert len(read_tools([search, {**TOOL, "defer_loading": True}]).listed) == 1


@pytest.mark.parametrize("tool", [{}, {"name": ""}, {"name": 3}, "x", {"type": "function", "function": {"name": "f"}}])
def test_malformed_tools_are_refused_by_path(tool: Any) -> None:
    with pytest.raises(RequestError, match=r"^tools\.1: a tool must be"):
        read_tools([TOOL, tool])
