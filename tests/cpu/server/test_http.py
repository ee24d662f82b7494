"""The API as raw HTTP: errors, ignored and refused fields, disconnecting clients, small endpoints."""

import gzip
from typing import Any

import httpx
import pytest

from strandline import LLM
from tests.cpu.server.process import ServerProcess, http_post

ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}

MALFORMED: list[tuple[str, bytes, str]] = [
    ("completions", b"", "the body is missing"),
    ("completions", b'{"prompt": "x", "n": }', "the body is not JSON: Expecting value at character 21"),
    ("completions", b"[1, 2, 3, 4, 5]", "the body must be an object, got [1, 2, 3, 4, ...]"),
    ("completions", b'"\xff"', "the body cannot be parsed: 'utf-8' codec can't decode byte 0xff in position 1"),
    ("completions", b'{"max_tokens": 1}', "prompt is missing"),
    ("completions", b'{"prompt": ' + b"[" * 50_000, "the body cannot be parsed: it is nested too deeply"),
    ("completions", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "a number has more than 4300 digits"),
    ("completions", b'{"prompt": "x", "\\ud800": 1}', "must be a string of valid Unicode"),
    ("embeddings", b'{"input": "x", "encoding_format": "zz"}', "encoding_format must be 'float' or 'base64'"),
    ("completions", b'{"prompt": ""}', "the prompt is empty"),
    ("completions", b'{"prompt": []}', "the prompt is empty"),
    ("completions", b'{"prompt": [[]]}', "the prompt is empty"),
    ("completions", b'{"prompt": 5}', "prompt"),
    ("completions", b'{"prompt": [1, "a"]}', "prompt"),
    ("completions", b'{"prompt": [true]}', "prompt"),
    ("completions", b'{"prompt": [256]}', "prompt token 256 is not in the vocabulary"),
    ("completions", b'{"prompt": [-1], "echo": true}', "token -1 is not in the vocabulary"),
    ("completions", b'{"prompt": [99999999999999999999999]}', "prompt"),
    ("completions", b'{"prompt": "\\ud800"}', "not valid Unicode"),
    ("completions", b'{"prompt": "x", "max_tokens": "5"}', 'max_tokens must be a whole number, got "5"'),
    ("completions", b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens must be a whole number, got 1.5"),
    ("completions", b'{"prompt": "x", "max_tokens": -1}', "max_tokens must be a whole number of at least 0"),
    ("completions", b'{"prompt": "x", "temperature": NaN}', "temperature"),
    ("completions", b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    ("completions", b'{"prompt": "x", "n": 0}', "n must be"),
    ("completions", b'{"prompt": "x", "n": 1000000}', "n must be"),
    ("completions", b'{"prompt": "x", "seed": 99999999999999999999999}', "seed"),
    ("completions", b'{"prompt": "x", "stop": [""]}', "stop"),
    ("completions", b'{"prompt": "x", "stop": [1]}', "stop must be a string or a list of strings, got [1]"),
    ("completions", b'{"prompt": "x", "echo": null}', "echo must be true or false, got null"),
    ("completions", b'{"prompt": "x", "logprobs": -1}', "logprobs must be at least 0, got -1"),
    ("completions", b'{"prompt": "x", "stream_options": {"include_usage": 5}}', "stream_options.include_usage must be"),
    ("completions", b'{"prompt": "x", "logprobs": 21}', "logprobs"),
    ("completions", b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias"),
    ("completions", b'{"prompt": "x", "logit_bias": {"999": 1}}', "token 999"),
    ("completions", b'{"prompt": "x", "logit_bias": {"1": 101}}', "logit_bias"),
    ("completions", b'{"prompt": "x", "stream_options": {"include_usage": true}}', "stream_options needs stream"),
    ("completions", b'{"prompt": "x", "cache_salt": 5}', "cache_salt"),
    ("completions", b'{"prompt": "x", "model": 5}', "model"),
    ("completions", b'{"prompt": "x", "bad_words": [""]}', "bad_words"),
    ("completions", b'{"prompt": "x", "cache_salt": "\\ud800"}', "not valid Unicode"),
    ("completions", b'{"prompt": "x", "stop": "\\ud800"}', "not valid Unicode"),
    ("completions", b'{"prompt": "x", "bad_words": ["\\ud800"]}', "not valid Unicode"),
    ("chat/completions", b"{}", "messages is missing"),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": "x"}], '
        b'"tool_choice": {"type": "function", "function": {"name": "f"}}}',
        "tool_choice names 'f', but there are no tools",
    ),
    (
        "chat/completions",
        b'{"messages": [{"role": "assistant", "content": "x", "reasoning": ["y"]}]}',
        "messages[0]: a message's reasoning must be a string, got ['y']",
    ),
    ("chat/completions", b'{"messages": []}', "messages must be a list of at least 1 item, got []"),
    ("chat/completions", b'{"messages": ["x"]}', "messages must be a list of objects, got ['x']"),
    ("chat/completions", b'{"messages": [{}]}', "must be a mapping with 'role' and 'content'"),
    ("chat/completions", b'{"messages": [{"role": 5, "content": "x"}]}', "must be a mapping with 'role' and 'content'"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', "must be a string or a list of parts"),
    (
        "chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "got {'type': 'image_url'}",
    ),
    ("chat/completions", b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "not valid Unicode"),
    (
        "chat/completions",
        b'{"messages": [{"role": "u", "content": "x"}], "chat_template": "{% x"}',
        "chat_template is not supported, got '{% x'",
    ),
    ("chat/completions", b'{"messages": [{"role": "u", "content": "x"}], "top_logprobs": 2}', "needs logprobs: true"),
]


@pytest.mark.parametrize(("path", "body", "message"), MALFORMED, ids=[str(body)[2:60] for _, body, _ in MALFORMED])
def test_malformed_body_gets_400_with_the_reason(server: ServerProcess, path: str, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http_post(f"{server.url}/v1/{path}", content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


def test_body_sent_as_form_gets_400_naming_the_header(server: ServerProcess) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = http_post(f"{server.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    expected = "the body must be sent with Content-Type: application/json, got application/x-www-form-urlencoded"
    assert answer.json()["error"]["message"] == expected


@pytest.mark.parametrize("prompt", [[1] * 5000, "word " * 5000, "word " * 50_000], ids=["tokens", "text", "long text"])
def test_prompt_beyond_the_context_has_its_own_code(server: ServerProcess, prompt: str | list[int]) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": str(prompt)}]}),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "the prompt is too long" in error["message"]
        assert "this model's maximum context length is" in error["message"]  # what LiteLLM looks for
        assert "raise --max-model-len" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_compressed_body_gets_415_naming_the_header(server: ServerProcess, path: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http_post(server.url + path, content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "identity")
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == "the body has Content-Encoding: gzip; send it without an encoding"


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_body_without_an_encoding_may_say_so(server: ServerProcess, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert http_post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 200


def test_parameter_of_a_path_is_named_in_errors(server: ServerProcess) -> None:
    answer = server.get("/cache/state?engine=first")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == 'engine must be a whole number, got "first"'
    assert error["param"] == "engine"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/responses", "/v1/responses"),
        ("//v1/completions", "/v1/completions"),
        ("/v1//completions", "/v1/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/demo/chat/completions", "/v1/chat/completions"),
        ("/v1/health", "/health"),
        ("/" * 60_000, None),
        ("/v1/nothing", None),
    ],
)
def test_path_of_another_base_url_gets_the_right_one(server: ServerProcess, path: str, meant: str | None) -> None:
    answer = server.post(path)
    advice = "GET /openapi.json describes all paths"
    if meant is not None:
        advice = f"did you mean {meant}? Check the client's base URL"
    message = f"there is no path {path[:200]}; {advice}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/conversations", "send previous_response_id"),
        ("/v1/conversations/conv_1/items", "send previous_response_id"),
        ("/v1/messages/batches", "send each request by itself"),
        ("/v1/files", "send their text in messages"),
        ("/api/chat", "Ollama's API is not served; set the client up for OpenAI's"),
        ("/api/version", "Ollama's API is not served"),
        ("/v1beta/models/demo:generateContent", "Google's API is not served"),
        ("/generate", "send tokens to /inference/v1/generate"),
        ("/v1", "/v1 is the base URL of OpenAI's clients"),
        ("/v1//", "/v1 is the base URL of OpenAI's clients"),
    ],
)
def test_path_that_is_not_served_says_what_to_do(server: ServerProcess, path: str, instead: str) -> None:
    answer = server.post(path)
    assert answer.status_code == 404
    assert instead in answer.json()["error"]["message"]


def test_root_names_the_addresses_of_the_apis(server: ServerProcess) -> None:
    answer = server.get("/")
    assert answer.status_code == 200
    assert all(f"  {path} " in answer.text for path in ("/v1", "/cache", "/openapi.json"))


UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "use_beam_search": True,
    "suffix": "x",
    "best_of": 2,
    "logits_processors": ["x"],
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_that_change_answers_are_refused(server: ServerProcess, name: str) -> None:
    answer = server.post("/v1/completions", prompt="x", **{name: UNSUPPORTED[name]})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.split("; ")[0] == f"{name} is not supported, got {UNSUPPORTED[name]!r}"


def test_what_nobody_knows_is_ignored_and_logged_once(server: ServerProcess) -> None:
    for _ in range(2):
        assert server.post("/v1/completions", prompt="x", user="me", suffix="", surprise=1).status_code == 200
    assert server.log().count("request field 'surprise' is unknown and ignored") == 1
    assert "'user'" not in server.log()


def test_request_with_two_lengths_is_refused_and_its_connection_closed(server: ServerProcess) -> None:
    chunked = b'e\r\n{"prompt":"x"}\r\n0\r\n\r\n'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(chunked)}\r\n"
    status, answer = server.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunked)
    assert status == 400
    assert "a Content-Length or a Transfer-Encoding, not both" in answer


def test_unknown_paths_and_methods_have_errors_of_the_same_shape(server: ServerProcess) -> None:
    for path, status, message in (
        ("/v1/nothing", 404, "there is no path /v1/nothing"),
        ("/v1/completions", 405, "GET is not allowed for /v1/completions; use POST"),
    ):
        answer = server.get(path)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_text_becomes_tokens_and_tokens_text(server: ServerProcess, offline_llm: LLM) -> None:
    expected = offline_llm.get_tokenizer().encode("héllo")
    answer = server.post("/tokenize", prompt="héllo").json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (expected, 6, 4096)
    assert server.post("/detokenize", tokens=expected).json() == {"prompt": "héllo"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["tokens"] == offline_llm.get_tokenizer().encode("u:x|a:")
    assert server.post("/tokenize").status_code == 400
    assert server.post("/detokenize", tokens=[256]).status_code == 400


def test_health_is_ok_and_log_describes_cache(server: ServerProcess) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert "version" in server.get("/version").json()
    assert "block: " in server.log()
    assert "shortest prefix that can hit: 1 token" in server.log()


def test_metrics_count_tokens_times_hits_and_the_reasons_of_misses(server: ServerProcess) -> None:
    names = ["prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"]
    names += ["prefix_cache_misses_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"]
    names += ["e2e_request_latency_seconds_count", "request_success_total"]
    names += [f"request_{part}_time_seconds_count" for part in ("queue", "prefill", "decode")]
    prompt, growth = "counted " * 10, server.growth_of(*names)
    for _ in range(2):
        server.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0)
    num_tokens = len(prompt)
    assert growth() == [2 * num_tokens, 10, 2 * num_tokens, num_tokens, num_tokens, 2, 8, 2, 2, 2, 2, 2]
    memory = server.metric("cache_memory_bytes")
    assert 15 * 2**20 < memory <= 16 * 2**20
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "snapshots_evicted_total"):
        assert server.metric(name) >= 0
    assert server.metric("snapshots_taken_total") > 0


def test_queue_prefill_and_decode_add_up_to_the_latency(server: ServerProcess) -> None:
    parts = [f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    growth = server.growth_of(*parts, "e2e_request_latency_seconds_sum")
    server.post("/v1/completions", prompt="timed", max_tokens=5)
    *times_s, latency_s = growth()
    assert min(times_s) > 0
    assert sum(times_s) == pytest.approx(latency_s)


def test_load_counts_unfinished_outputs(server: ServerProcess) -> None:
    server.wait_until_idle()
    with server.stream(prompt="x", max_tokens=4000, ignore_eos=True, n=2) as events:
        next(events)
        assert server.get("/load").json() == {"server_load": 2}
    server.wait_until(lambda: server.get("/load").json() == {"server_load": 0})


def abandon(server: ServerProcess, body: dict[str, Any]) -> None:
    """Send a request, wait until it runs, and hang up."""
    request = httpx.Request("POST", f"{server.url}/v1/completions", json=body)
    request.read()
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with server.connect() as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        server.wait_until(lambda: server.metric("num_requests_running") > 0)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_everything(server: ServerProcess, is_streamed: bool) -> None:
    growth = server.growth_of("generation_tokens_total", "request_success_total")
    abandon(server, {**ENDLESS, "n": 2, "stream": is_streamed})
    server.wait_until(lambda: server.metric("num_requests_running") == 0)
    assert growth() == [0, 1]
    in_use = [line for line in server.metrics().splitlines() if "_in_use" in line]
    assert [float(line.split()[-1]) for line in in_use] == [0, 0]
