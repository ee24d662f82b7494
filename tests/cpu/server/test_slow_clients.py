"""Clients that stop reading or sending."""

import asyncio
import json
import socket
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Scope

from strandline.server.http.body_timeout import BodyTimeout
from strandline.server.http.error_responses import add_error_handlers
from strandline.server.requests.request_bodies import DetokenizeBody
from tests.cpu.server.process import ServerProcess


def test_stalled_body_gets_error_in_shape_of_its_path() -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/v1/completions")
    async def complete(body: DetokenizeBody) -> Any:
        raise AssertionError(body)

    pieces: list[Message] = [{"type": "http.request", "body": b'{"tokens": [', "more_body": True}]
    sent: list[Message] = []

    async def receive() -> Message:
        return pieces.pop() if pieces else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")],
        "server": ("x", 1),
        "scheme": "http",
    }
    asyncio.run(BodyTimeout(app, 0.01)(scope, receive, send))
    start, body = sent
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert "the rest of the body has not arrived" in json.loads(body["body"])["error"]["message"]


def test_a_client_that_stops_reading_ends_its_request(impatient_server: ServerProcess) -> None:
    server = impatient_server
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 4000, "n": 4, "logprobs": 20, "stream": true}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda: "read nothing for 1 s" in server.log())
        server.wait_until(lambda: server.metric("num_requests_running") == 0)

        def finished(reason: str) -> Any:
            return f'finished_reason="{reason}"' in server.metrics()

        assert not finished("length")
