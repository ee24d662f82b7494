"""Ids of requests in headers, errors and names, and paths with a slash at the end."""

import asyncio

import anthropic
import httpx
import openai
import pytest
from fastapi import FastAPI

from strandline.server.http.error_responses import add_error_handlers
from strandline.server.http.request_ids import RequestIds
from tests.cpu.server.process import ServerProcess, http_post, http_stream

USER = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/completions": ("cmpl-", {"prompt": "x", "max_tokens": 1}),
    "/v1/chat/completions": ("chatcmpl-", {"messages": USER, "max_tokens": 1}),
    "/v1/responses": ("resp_", {"input": "x", "max_output_tokens": 1}),
    "/v1/messages": ("msg_", {"messages": USER, "max_tokens": 1}),
    "/v1/embeddings": ("embd-", {"input": "x"}),
    "/inference/v1/generate": ("generate-", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
}


@pytest.mark.parametrize("path", BODIES)
def test_headers_have_the_id_in_the_name_of_the_response(server: ServerProcess, path: str) -> None:
    prefix, body = BODIES[path]
    answer = http_post(server.url + path, json=body)
    shown = answer.headers["x-request-id"]
    assert answer.headers["request-id"] == shown
    name = answer.json().get("id") or answer.json()["request_id"]
    assert name == f"{prefix}{shown}"


def test_clients_may_give_equal_ids(server: ServerProcess) -> None:
    url, body = f"{server.url}/v1/completions", {**BODIES["/v1/completions"][1], "stream": True}
    headers = {"X-Request-Id": "their-1.2:3_4"}
    with http_stream("POST", url, json=body, headers=headers) as first:
        second = http_post(url, json={**body, "stream": False}, headers=headers)
        first.read()
        names = {second.json()["id"], openai_id(first.text)}
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "their-1.2:3_4"
    assert len(names) == 2
    assert all(name.startswith("cmpl-their-1.2:3_4-") for name in names)


def openai_id(events: str) -> str:
    return events.split('"id":"')[1].split('"')[0]


@pytest.mark.parametrize("given", ["", "a b", "a/b", "a\tb", "é", '"', "x" * 129])
def test_ids_that_could_do_harm_are_replaced(server: ServerProcess, given: str) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"X-Request-Id": given.encode("latin-1")})
    assert len(answer.headers["x-request-id"]) == 32


def test_clients_report_the_ids_of_responses_and_errors(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=client.models.list().data[0].id, prompt="x", max_tokens=1)
        assert answer.id == f"cmpl-{answer._request_id}"
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(model="none", prompt="x")
        assert refused.value.request_id
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as not_found:
            client.messages.create(model="none", messages=[{"role": "user", "content": "x"}], max_tokens=1)
        assert isinstance(not_found.value.body, dict)
        assert not_found.value.request_id == not_found.value.body["request_id"]


def test_refusals_before_the_application_have_ids(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"Host": "evil.example", "X-Request-Id": "theirs"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (403, "theirs")


def test_unexpected_errors_have_ids(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    add_error_handlers(app)
    app.add_middleware(RequestIds)

    @app.get("/v1/messages")
    async def fail() -> None:
        raise ZeroDivisionError

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v1/messages", headers={"X-Request-Id": "theirs"})

    answer = asyncio.run(get())
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == answer.json()["request_id"] == "theirs"
    assert "request theirs to '/v1/messages' failed" in caplog.text


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/cache/", "/metrics/", "/v1/models/?limit=2"])
def test_slash_at_the_end_of_a_path_is_ignored(server: ServerProcess, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 200
    if path != "/metrics/":
        assert answer.content == httpx.get(server.url + path.replace("/?", "?").removesuffix("/")).content


@pytest.mark.parametrize("path", BODIES)
def test_requests_to_paths_with_a_slash_are_served(server: ServerProcess, path: str) -> None:
    assert httpx.post(f"{server.url}{path}/", json=BODIES[path][1], timeout=60).status_code == 200
