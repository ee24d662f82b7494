"""A transport of httpx that takes little CPU time per part of a response: one callback and a parser in C.

httpx's own takes about 200 µs of one core per event of a stream, so that the load generator, not the server, would
limit a run of a thousand streams. HTTP/1.1 alone is spoken, and no proxy is used.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

import httptools
import httpx

Origin = tuple[str, str, int | None]
NO_BODY_BEFORE: Final = 200
"""Statuses below are provisional: another response follows."""


class StreamTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections that it keeps open.

    The client's time limits apply to the connection and to the head of a response, not to the parts of its body.
    """

    def __init__(self) -> None:
        self._idle = defaultdict[Origin, list[_Connection]](list)
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return its response as soon as its head has arrived."""
        data = _head(request) + await request.aread()
        limits = request.extensions.get("timeout", {})
        idle = self._idle[request.url.scheme, request.url.host, request.url.port]
        connection, is_reused = _take_open(idle), True
        if connection is None:
            connection, is_reused = await self._connect(request.url, limits.get("connect")), False
        try:
            async with asyncio.timeout(limits.get("read")):
                try:
                    await connection.ask(data)
                except httpx.ReadError:
                    if not is_reused or connection.has_answered:
                        raise
                    # The server has closed the idle connection at the moment at which it was used again.
                    connection = await self._connect(request.url, limits.get("connect"))
                    await connection.ask(data)
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise httpx.ReadTimeout("the response has not begun in time", request=request) from error
            raise
        return httpx.Response(connection.status, headers=connection.headers, stream=_Body(connection, idle))

    async def _connect(self, url: httpx.URL, timeout_s: float | None) -> "_Connection":
        loop, is_secure = asyncio.get_running_loop(), url.scheme == "https"
        if is_secure and self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        port = url.port or (443 if is_secure else 80)
        try:
            async with asyncio.timeout(timeout_s):
                tls = self._tls if is_secure else None
                _, connection = await loop.create_connection(_Connection, url.host, port, ssl=tls)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {url.host}:{port} in time") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise httpx.ConnectError(str(error)) from error
        return connection

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % field for field in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


def _take_open(idle: "list[_Connection]") -> "_Connection | None":
    while idle:
        connection = idle.pop()
        if connection.is_open:
            return connection
    return None


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.is_complete = False
        """The whole response has arrived."""
        self.has_answered = False
        """A part of the response has arrived."""
        self.can_be_reused = False
        self._has_head = False
        self._error: str | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def ask(self, data: bytes) -> None:
        """Send a request, and wait for the head of its response.

        Raises:
            httpx.ReadError: the connection is closed before, or what comes is no HTTP.
        """
        self.status, self.headers, self.parts = 0, [], []
        self.is_complete = self.has_answered = self.can_be_reused = self._has_head = False
        if self._transport is not None:
            self._transport.write(data)
        while not self._has_head:
            await self.wait()

    async def wait(self) -> None:
        """Wait until more has arrived.

        Raises:
            httpx.ReadError: the response is not complete, and nothing more comes.
        """
        if self._error is not None:
            raise httpx.ReadError(self._error)
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def abort(self) -> None:
        """Close the connection."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # Of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = f"the response is not HTTP: {error}"
            self.abort()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        names = {name.lower() for name, _ in self.headers}
        if self._has_head and error is None and names.isdisjoint({b"content-length", b"transfer-encoding"}):
            self.is_complete = True  # the end of the connection is that of the body
        elif not self.is_complete and self._error is None:
            self._error = str(error or "the server has closed the connection")
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # Of the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise httpx.ReadError("a response has come that no request asked for")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= NO_BODY_BEFORE

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head
        self.can_be_reused = self._parser.should_keep_alive()


class _Body(httpx.AsyncByteStream):
    """The body of a response, as it arrives."""

    def __init__(self, connection: _Connection, idle: list[_Connection]) -> None:
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        while True:
            if connection.parts:
                parts, connection.parts = connection.parts, []
                yield b"".join(parts)
            elif connection.is_complete:
                return
            else:
                await connection.wait()

    async def aclose(self) -> None:
        if self._connection.is_complete and self._connection.can_be_reused and self._connection.is_open:
            self._idle.append(self._connection)
        else:
            self._connection.abort()
