"""Serving an application over HTTP or HTTPS until a signal, with uvicorn."""

import asyncio
import signal
import socket
import ssl
from functools import partial
from time import monotonic
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from strandline.server.engines.engine_client import EngineClient
from strandline.server.http.body_timeout import BodyTimeout
from strandline.server.http.http_protocol import HttpProtocol
from strandline.server.http.listener import log_loop_error
from strandline.server.http.malformed_requests import MalformedRequests, drop_uvicorns_warnings
from strandline.server.http.response_parts import ResponseParts

LOOK_S: Final = 0.1
"""How often the server checks for a second Ctrl-C and, while it drains, for engines that hang."""
ANSWER_S: Final = 1.0
"""How long a server that is stopped at once takes to tell its clients."""
CLOSE_S: Final = 0.02
"""How often it then checks whether all connections are closed."""


async def serve_http(config: uvicorn.Config, listener: socket.socket, client: EngineClient) -> bool:
    """Serve until a signal; return whether a second Ctrl-C ended unfinished requests."""
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    http = uvicorn.Server(config)
    # At shutdown uvicorn raises the signals that it handled again, for the handlers that were installed before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    watching = asyncio.ensure_future(_watch(http, client))
    try:
        await http.serve(sockets=[listener])
        if http.force_exit:
            await watching
    finally:
        watching.cancel()
    return http.force_exit


async def _watch(http: uvicorn.Server, client: EngineClient) -> None:
    """Fail engines that hang while the server drains; return once a second Ctrl-C has ended all requests.

    From Python 3.12.1 on, asyncio's server waits for all connections when it is closed, also if uvicorn is forced to
    exit: the requests are ended while uvicorn still waits.
    """
    while not http.force_exit:
        await asyncio.sleep(LOOK_S)
        if http.should_exit:
            client.fail_hung()
    for engine in client.engines:
        client.fail(engine, "the server was stopped")
    connections = http.server_state.connections
    deadline_s = monotonic() + ANSWER_S
    while connections and monotonic() < deadline_s:
        await asyncio.sleep(CLOSE_S)
    for connection in [*connections]:
        connection.transport.abort()  # its client does not read, or is still sending


def http_config(app: ASGIApp, client_timeout_s: float | None, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration for an application.

    Args:
        client_timeout_s: time limit of clients; None: no limit.
        tls: None: plain HTTP.
    """
    drop_uvicorns_warnings()
    protocol: Any = partial(HttpProtocol, client_timeout_s=client_timeout_s, malformed=MalformedRequests())
    return uvicorn.Config(
        BodyTimeout(ResponseParts(app), client_timeout_s),
        http=protocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
