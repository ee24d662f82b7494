"""Whatever a body says, the answer is an answer or a 4xx, and the server goes on."""

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.server.bodies import ChatBody, CompletionBody
from tests.cpu.server.process import ServerProcess

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
FIELDS = sorted(
    (CompletionBody.model_fields.keys() | ChatBody.model_fields.keys() | {"system", "tools", "x"}) - {"model"}
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
BOUNDED = {"max_tokens": 2, "max_completion_tokens": 2}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["completions", "chat/completions", "messages"]), BODIES, st.booleans())
def test_no_body_makes_a_5xx(server: ServerProcess, path: str, fields: dict[str, Any], is_plausible: bool) -> None:
    sound = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]} if is_plausible else {}
    body = {**BOUNDED, **sound, **fields}
    if body["max_tokens"] is None or body["max_completion_tokens"] is None:
        body |= BOUNDED
    content = json.dumps(body).encode(errors="surrogatepass")
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code < 500, answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
    assert server.process.poll() is None
