"""Any request body gets an answer or a 4xx, and the server keeps running."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strandline.server.cache_page import ExplainBody
from strandline.server.messages_api import MessagesBody
from strandline.server.request_bodies import ChatBody, CompletionBody, TokenizeBody
from strandline.server.responses_api import ResponsesBody
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
