"""Invalid request bodies get errors in the shape that the path's clients expect."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from strandline.errors import RequestError
from strandline.records.events import Limits
from strandline.server.messages.api import MessagesBody
from strandline.server.requests.request_bodies import CompletionBody
from strandline.server.requests.service import LONG_CHARACTERS, Service
from strandline.text.frontend import Frontend
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_post

COMPLETION = ("/v1/completions", {"prompt": "x", "max_tokens": 1})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
MESSAGE = ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
RESPONSE = ("/v1/responses", {"input": "x", "max_output_tokens": 1})
MANY = 100_000


def items(*content: Any) -> list[Any]:
    return [{"type": "reasoning", "content": list(content)}, {"kind": "nothing"}]


@pytest.mark.parametrize(
    ("request_of", "field", "value", "message"),
    [
        (COMPLETION, "max_tokens", 2**70, "max_tokens must be a whole number"),
        (COMPLETION, "max_tokens", 5.0, ""),
        (CHAT, "max_completion_tokens", 5.0, ""),
        (MESSAGE, "max_tokens", 5.0, ""),
        (RESPONSE, "max_output_tokens", 5.0, ""),
        (COMPLETION, "top_k", float("1e400"), "top_k must be a whole number"),
        (COMPLETION, "top_k", 2**70, "top_k must be a whole number"),
        (COMPLETION, "min_tokens", 2**70, "min_tokens must be a whole number"),
        (COMPLETION, "n", 10**9, "n must be a whole number between 1 and 1024"),
        (COMPLETION, "logprobs", 10**9, "logprobs must be a whole number between 0 and 20"),
        (COMPLETION, "temperature", float("nan"), "temperature must be a number"),
        (COMPLETION, "temperature", 10**400, "temperature"),
        (COMPLETION, "stop", ["a"] * MANY, "stop has 100000 strings"),
        (COMPLETION, "stop", "a" * MANY, "at most 256 and 65536"),
        (COMPLETION, "bad_words", ["a"] * MANY, "bad_words has 100000 strings"),
        (COMPLETION, "bad_words", [1] * MANY, "bad_words"),
        (COMPLETION, "logit_bias", {"1": "x"}, "logit_bias of token 1 must be a number"),
        (COMPLETION, "prompt", ["a"] * MANY, "100000 outputs"),
        (COMPLETION, "prompt", [[1]] * MANY, "100000 outputs"),
        (COMPLETION, "prompt", [1] * MANY, "100000 tokens"),
        (COMPLETION, "prompt", "a " * 1_000_000, "2000000 characters"),
        (COMPLETION, "prompt", ["a", 1] * MANY, "must be a text, a list of token ids"),
        (COMPLETION, "prompt", [[1, "a"]] * MANY, "must be a text, a list of token ids"),
        (COMPLETION, "prompt", [True], "must be a text, a list of token ids"),
        (COMPLETION, "prompt", [[[1]]], "must be a text, a list of token ids"),
        (COMPLETION, "stop_token_ids", [1, 2.0], "must be a list of token ids"),
        (COMPLETION, "guided_regex", "\ud800", "not valid Unicode"),
        (COMPLETION, "guided_grammar", "start: /\ud800/", "not valid Unicode"),
        (COMPLETION, "guided_choice", ["\ud800"], "guided_choice cannot be used"),
        (COMPLETION, "guided_regex", "(((a{1,1000}){1,1000}){1,1000}b", "guided_regex"),
        (CHAT, "messages", [1] * MANY, "messages"),
        (CHAT, "messages", [{"role": "user", "content": "a " * 1_000_000}], "characters"),
        (CHAT, "tools", [1] * MANY, "tools"),
        (CHAT, "tools", [{"function": {"name": "f", "parameters": {"required": 5}}}], "parameters of tool 'f'"),
        (CHAT, "response_format", {"type": []}, "response_format must be"),
        (CHAT, "response_format", {"type": "json_object", "schema": 5}, "response_format.schema must be an object"),
        (CHAT, "functions", [{"name": "f"}], "; send tools"),
        (CHAT, "system", "Be brief.", "this API has no system; send a message of the role system"),
        (CHAT, "stop_sequences", ["x"], "this API has no stop_sequences; send stop"),
        (CHAT, "system", "", ""),
        (CHAT, "max_output_tokens", None, ""),
        (CHAT, "max_output_tokens", 5, ""),
        (COMPLETION, "max_completion_tokens", 5, ""),
        (RESPONSE, "max_tokens", 5, ""),
        (RESPONSE, "response_format", {"type": "json_object"}, "this API has no response_format; send text.format"),
        (RESPONSE, "response_format", {"type": "text"}, ""),
        (MESSAGE, "stop", ["x"], "send stop_sequences"),
        (MESSAGE, "stop", [], ""),
        (CHAT, "modalities", ["audio"], "modalities is not supported"),
        (CHAT, "modalities", ["text", "audio"], "modalities is not supported"),
        (CHAT, "modalities", ["text"], ""),
        (CHAT, "messages", [{"role": "bogus", "content": "x"}], "role must be one of system, developer, user, "),
        (MESSAGE, "messages", [{"role": "bogus", "content": "x"}], "role must be one of system, developer, user, "),
        (MESSAGE, "thinking", {"type": "bogus"}, "thinking.type must be one of enabled, disabled, adaptive; got 'bog"),
        (MESSAGE, "thinking", {"type": []}, "thinking.type must be one of"),
        (MESSAGE, "thinking", {}, "thinking.type must be one of"),
        (MESSAGE, "thinking", {"type": "adaptive"}, ""),
        (MESSAGE, "thinking", {"type": "enabled", "budget_tokens": 1024}, ""),
        (MESSAGE, "thinking", 5, "thinking"),
        (MESSAGE, "output_config", {"format": 5}, "output_config.format must be"),
        (MESSAGE, "stop_sequences", [""], "non-empty"),
        (RESPONSE, "max_output_tokens", 2**70, "max_output_tokens must be"),
        (RESPONSE, "input", items(5), "input[1] must be an item with a type"),
        (RESPONSE, "input", items({"text": 5}), "input[1] must be an item with a type"),
        (RESPONSE, "text", {"format": 5}, "text.format must be"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_it_is_refused_and_the_server_goes_on(
    server: ServerProcess, request_of: tuple[str, dict[str, Any]], field: str, value: Any, message: str
) -> None:
    path, body = request_of
    body = {**body, field: value}
    answer = http_post(server.url + path, content=dumped(body), headers=JSON)
    if message:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")
    else:
        assert answer.status_code == 200
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("request_of", "fields", "param"),
    [
        (COMPLETION, {"seed": 2**63}, "seed"),
        (COMPLETION, {"max_tokens": -1}, "max_tokens"),
        (COMPLETION, {"logprobs": 21}, "logprobs"),
        (COMPLETION, {"logit_bias": {"1": 101}}, "logit_bias"),
        (COMPLETION, {"best_of": 2}, "best_of"),
        (COMPLETION, {"stop": 5}, "stop"),
        (COMPLETION, {"stop": ["x", "\ud800"]}, "stop"),
        (COMPLETION, {"bad_words": ["\ud800"]}, "bad_words"),
        (COMPLETION, {"cache_salt": "\ud800"}, "cache_salt"),
        (COMPLETION, {"guided_regex": "\ud800"}, "guided_regex"),
        (CHAT, {"cache_salt": "\ud800"}, "cache_salt"),
        (COMPLETION, {"stream": True, "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        (CHAT, {"tool_choice": 5}, "tool_choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [{}]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort"),
        (RESPONSE, {"reasoning": {"effort": []}}, "reasoning.effort"),
        (CHAT, {"max_tokens": None, "max_output_tokens": 1}, "max_output_tokens"),
        (COMPLETION, {"max_tokens": None, "max_completion_tokens": 1}, "max_completion_tokens"),
        (RESPONSE, {"max_output_tokens": None, "max_tokens": 1}, "max_tokens"),
        (RESPONSE, {"reasoning": {"summary": "auto"}, "reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"response_format": {"type": "json_schema", "schema": {"type": "strin"}}}, "response_format"),
        (COMPLETION, {"guided_regex": "("}, "guided_regex"),
        (COMPLETION, {"guided_regex": "a", "ignore_eos": True}, "guided_regex"),
        (COMPLETION, {"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        (COMPLETION, {"prompt": [10**6]}, "prompt"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 1, "min_tokens": 2}, "max_completion_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"response_format": {"type": "nope"}}, "response_format"),
        (CHAT, {"messages": [{"role": "bogus", "content": "x"}]}, "messages"),
        (MESSAGE, {"max_tokens": -1}, "max_tokens"),
        (MESSAGE, {"compaction": {"type": "summarize"}}, "compaction"),
        (MESSAGE, {"thread": {"type": "continue"}}, "thread"),
        (CHAT, {"moderation": {"model": "m"}}, "moderation"),
        (CHAT, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (CHAT, {"thread": {"type": "create"}}, "thread"),
        (MESSAGE, {"conversation": {"id": "conv_1"}}, "conversation"),
        (MESSAGE, {"thinking": {"type": "bogus"}}, "thinking.type"),
        (MESSAGE, {"stop_sequences": [""]}, "stop_sequences"),
        (MESSAGE, {"output_format": {"type": "nope"}}, "output_format"),
        (RESPONSE, {"max_output_tokens": -1}, "max_output_tokens"),
        (RESPONSE, {"text": {"format": {"type": "nope"}}}, "text.format"),
        (RESPONSE, {"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        (RESPONSE, {"background": True}, "background"),
        (RESPONSE, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSE, {"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ],
    ids=str,
)
def test_errors_name_the_field_that_was_sent(
    server: ServerProcess, request_of: tuple[str, dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    path, body = request_of
    answer = http_post(server.url + path, content=dumped({**body, **fields}), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    named = "conversation" if param == "input" else param.removesuffix("s")
    assert re.search(rf"(?<!\w){re.escape(named)}", error["message"])


def test_default_of_own_field_does_not_replace_a_foreign_one() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "max_completion_tokens": 5})
    with pytest.raises(RequestError, match="this API has no max_completion_tokens; send max_tokens"):
        body.sampling_params({})


def test_budget_of_reasoning_may_be_written_with_a_fraction() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024.0}
    body = MessagesBody.model_validate({**MESSAGE[1], "thinking": thinking})
    assert type(body.sampling_params({}, has_budgets=True).thinking_token_budget) is int


JSON = {"Content-Type": "application/json"}


def dumped(body: Any) -> bytes:
    """Return JSON with whatever Python puts there: NaN, lone surrogates, integers of any size."""
    return json.dumps(body).encode()


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/cache/explain"])
@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"null", b"[]", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000, b"\x1f\x8b",
     b'{"seed": ' + b"9" * 5000 + b"}"],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_invalid_body_gets_400_in_shape_of_its_path(server: ServerProcess, path: str, content: bytes) -> None:
    answer = http_post(server.url + path, content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (answer.json().get("type") == "error") == path.startswith("/v1/messages")


def test_anthropics_errors_have_anthropics_types(server: ServerProcess) -> None:
    path, body = MESSAGE
    answer = server.post(path, **{**body, "model": "unknown"})
    assert answer.status_code == 404
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "not_found_error")


def test_a_long_text_does_not_hold_up_short_ones() -> None:
    class Tokenizer:
        is_asked, may_go = threading.Event(), threading.Event()

        def get_vocab(self) -> dict[str, int]:
            return {"a" * 1000: 0}

        def encode(self, text: str, **_: Any) -> list[int]:
            if len(text) > LONG_CHARACTERS:
                self.is_asked.set()
                assert self.may_go.wait(TIMEOUT_S)
            return [len(text)]

    class Client:
        frontend = Frontend(Limits(VOCAB_SIZE, 1000), tokenizer=Tokenizer())

    service = Service(Client(), ["tiny"])  # type: ignore[arg-type]

    async def ask() -> list[int]:
        long = asyncio.ensure_future(service.encode("a" * (LONG_CHARACTERS + 1)))
        assert await asyncio.to_thread(Tokenizer.is_asked.wait, TIMEOUT_S)
        short = await service.encode("abc")
        assert not long.done()
        Tokenizer.may_go.set()
        return [*short.token_ids, *(await long).token_ids]

    assert asyncio.run(ask()) == [3, LONG_CHARACTERS + 1]


def test_text_longer_than_any_prompt_is_not_tokenized() -> None:
    class Client:
        frontend = Frontend(Limits(VOCAB_SIZE, 100), tokenizer=byte_tokenizer())

    service = Service(Client(), ["tiny"])  # type: ignore[arg-type]
    assert len(asyncio.run(service.encode("a" * 200)).token_ids) == 200
    with pytest.raises(RequestError, match="201 characters, and this model's maximum context length is at most 200"):
        asyncio.run(service.encode("a" * 201))
