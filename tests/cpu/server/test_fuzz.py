"""Any request body gets an answer or a 4xx, and the server keeps running."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.server.cache_page import ExplainBody
from strandline.server.messages.api import MessagesBody
from strandline.server.requests.request_bodies import ChatBody, CompletionBody, TokenizeBody
from strandline.server.responses.api import ResponsesBody
from tests.cpu.server.process import ServerProcess, http_post

SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 7, 255, 256, 2**31, 2**63, 10**30])
    | st.floats(width=32)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MODELS = (CompletionBody, ChatBody, MessagesBody, ResponsesBody, TokenizeBody, ExplainBody)
FIELDS = sorted({name for model in MODELS for name in model.model_fields} - {"model"} | {"tokens", "x"})
PATHS = ["v1/completions", "v1/chat/completions", "v1/messages", "v1/messages/count_tokens", "v1/responses"]
PATHS += ["tokenize", "detokenize", "cache/explain"]
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
BOUNDED = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}


@settings(max_examples=5 * settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PATHS), BODIES, st.booleans())
def test_no_body_makes_a_5xx(server: ServerProcess, path: str, fields: dict[str, Any], is_plausible: bool) -> None:
    sound: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    sound |= {"input": "x"} if path == "v1/responses" else {"prompt": "x"} if path != "v1/messages" else {}
    body = {**BOUNDED, **(sound if is_plausible else {}), **fields}
    if any(body[name] is None for name in BOUNDED):
        body |= BOUNDED
    content = json.dumps(body).encode(errors="surrogatepass")
    headers = {"Content-Type": "application/json"}
    answer = http_post(f"{server.url}/{path}", content=content, headers=headers)
    assert answer.status_code < 500, answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
    assert server.process.poll() is None


TYPES = ["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"]
TYPES += ["local_shell_call", "shell_call_output", "web_search_call", "mcp_call", "computer_call_output", "compaction"]
TYPES += ["additional_tools", "tool_search_output", "item_reference", "tea", "tea_call", "tea_call_output"]
PART_TYPES = ["input_text", "output_text", "refusal", "input_image", "input_file", "reasoning_text", "tea"]
TEXTS = st.sampled_from(["", "x", "{}", '{"a": 1}', "[", "é\U0001f600", "\ud800", "data:text/plain;base64,eA=="])
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(PART_TYPES)},
    optional=dict.fromkeys(("text", "refusal", "image_url", "file_data", "filename"), TEXTS | SCALARS),
)
CONTENTS = TEXTS | st.lists(PARTS, max_size=2) | VALUES
TOOL_TYPES = ["function", "custom", "namespace", "web_search", "mcp", "tea"]
FORMATS = st.sampled_from([None, {"type": "text"}, {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}])
TOOLS = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from(TOOL_TYPES), "name": st.sampled_from(["f", "g", "n__f", "é", ""])},
        optional={"description": TEXTS, "parameters": VALUES, "format": FORMATS | VALUES},
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("namespace"), "name": st.sampled_from(["n", "n__"]), "tools": st.lists(inner, max_size=2)}
    ),
    max_leaves=3,
)
ITEM_FIELDS = ("id", "name", "namespace", "arguments", "input", "encrypted_content", "status", "error")
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES), "call_id": st.sampled_from(["c", "c", "c", None]), "output": CONTENTS},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer", "system", "tool"]),
        **dict.fromkeys(("content", "summary", "action", "results"), CONTENTS),
        **dict.fromkeys(ITEM_FIELDS, TEXTS | SCALARS),
        "tools": st.lists(TOOLS, max_size=2),
    },
)
CHOICES = st.sampled_from(["auto", "auto", "none", "required", {"type": "function", "name": "f"}, {"type": "mcp"}, 5])


@settings(max_examples=5 * settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ITEMS, max_size=4), st.lists(TOOLS, max_size=3), CHOICES)
def test_no_item_or_tool_makes_a_5xx(
    tag_server: ServerProcess, items: list[Any], tools: list[Any], choice: Any
) -> None:
    body = {"input": items, "tools": tools, "tool_choice": choice, "max_output_tokens": 1}
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = http_post(f"{tag_server.url}/v1/responses", content=content, headers=headers)
    assert answer.status_code < 500, (answer.text, body)
    assert answer.status_code == 200 or answer.json()["error"]["message"]
