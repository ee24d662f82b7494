"""Serving an application over HTTP or HTTPS until a signal, with uvicorn."""

import asyncio
import signal
import socket
import ssl
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from strandline.server.engines.engine_client import EngineClient
from strandline.server.http.body_timeout import BodyTimeout
from strandline.server.http.http_protocol import HttpProtocol
from strandline.server.http.listener import log_loop_error
from strandline.server.http.response_parts import ResponseParts

LOOK_S: Final = 0.5
"""How often a server that drains looks whether an engine hangs."""
ANSWER_S: Final = 1.0
"""How long a server that is stopped at once takes to tell its clients."""


async def serve_http(config: uvicorn.Config, listener: socket.socket, client: EngineClient) -> bool:
    """Serve until a signal; return whether a second Ctrl-C ended unfinished requests."""
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    http = uvicorn.Server(config)
    # At shutdown uvicorn raises the signals that it handled again, for the handlers that were installed before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    watching = asyncio.ensure_future(_fail_hung(http, client))
    try:
        await http.serve(sockets=[listener])
    finally:
        watching.cancel()
    if http.force_exit:
        for engine in client.engines:
            client.fail(engine, "the server was stopped")
        if http.server_state.tasks:
            await asyncio.wait(http.server_state.tasks, timeout=ANSWER_S)
    return http.force_exit


async def _fail_hung(http: uvicorn.Server, client: EngineClient) -> None:
    """Once the server drains, do not let it wait for engines that hang."""
    while True:
        await asyncio.sleep(LOOK_S)
        if http.should_exit:
            client.fail_hung()


def http_config(app: ASGIApp, client_timeout_s: float | None, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration for an application.

    Args:
        client_timeout_s: time limit of clients; None: no limit.
        tls: None: plain HTTP.
    """
    protocol: Any = partial(HttpProtocol, client_timeout_s=client_timeout_s)
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
