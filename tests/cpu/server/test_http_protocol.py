"""Connections whose clients neither send a complete request nor read a complete response."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Final

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from strandline.server.http.response_parts import MAX_PART_BYTES
from strandline.server.http.serving import http_config
from strandline.server.http.stream_writer import STREAM_WRITER
from strandline.server.launch import listen
from tests.cpu.server.steady_loop import run_steadily

TIMEOUT_S: Final = 60.0
CLIENT_TIMEOUT_S: Final = 0.2
KEEP_ALIVE_S: Final = 1
"""Shorter than uvicorn's default, so that the tests are quick."""
REQUEST: Final = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF: Final = REQUEST[:20]
MORE_THAN_BUFFERS_HOLD: Final = 2**26
PARTS: Final = (b"data: a\n\n", b"data: 0123456789abcdef\n\n", bytes(MAX_PART_BYTES))


async def short(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"done"})


async def long(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": bytes(MORE_THAN_BUFFERS_HOLD)})


async def burst(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": bytes(MORE_THAN_BUFFERS_HOLD), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(3 * CLIENT_TIMEOUT_S)
    await short(scope, receive, send)


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream until the client leaves."""
    await send({"type": "http.response.start", "status": 200})
    leaving = asyncio.ensure_future(receive_disconnect(receive))
    while not leaving.done():
        await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await asyncio.sleep(0)


async def sent(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    for part in PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def written(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as ``sent`` does, but write the parts directly."""
    writer = scope[STREAM_WRITER]
    await send({"type": "http.response.start", "status": 200})
    assert not writer.write(b"")
    assert not writer.write(bytes(MAX_PART_BYTES + 1))
    assert all(writer.write(part) for part in PARTS)
    await send({"type": "http.response.body", "body": b""})


async def which(scope: Scope, receive: Receive, send: Send) -> None:
    """Say whether parts can be written directly."""
    body = b"yes!" if STREAM_WRITER in scope else b"no.."
    await send({"type": "http.response.start", "status": 200, "headers": [(b"is", body), (b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": body})


async def receive_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Clients:
    """Connections to a server."""

    def __init__(self, server: uvicorn.Server, address: tuple[str, int]) -> None:
        self._address = address
        self._server = server
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address)
        self.writers.append(writer)
        return reader, writer

    @property
    def num_served(self) -> int:
        return len(self._server.server_state.connections)


@asynccontextmanager
async def clients_of(app: ASGIApp, client_timeout_s: float = CLIENT_TIMEOUT_S) -> AsyncIterator[Clients]:
    """Serve an application as ``strandline serve`` does."""
    config = http_config(app, client_timeout_s)
    config.timeout_keep_alive = KEEP_ALIVE_S
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        clients = Clients(server, listener.getsockname())
        running = asyncio.ensure_future(server.serve([listener]))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield clients
        finally:
            for writer in clients.writers:
                writer.close()
            server.should_exit = True
            await asyncio.wait_for(running, TIMEOUT_S)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def seconds_until_closed(reader: asyncio.StreamReader) -> float:
    start_s = monotonic()
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    return monotonic() - start_s


async def read_answer(reader: asyncio.StreamReader) -> None:
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(4) == b"done"


async def trickle(writer: asyncio.StreamWriter) -> None:
    """Send a head that never ends."""
    writer.write(REQUEST[:-2])
    while True:
        await asyncio.sleep(CLIENT_TIMEOUT_S / 10)
        writer.write(b"X: y\r\n")


def test_connection_that_sends_nothing_is_closed() -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, _ = await clients.connect()
            assert await seconds_until_closed(reader) < TIMEOUT_S / 2

    run_steadily(run())


@pytest.mark.parametrize("num_before", [0, 1])
def test_head_that_never_ends_is_closed(num_before: int) -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, writer = await clients.connect()
            for _ in range(num_before):
                writer.write(REQUEST)
                await read_answer(reader)
            trickling = asyncio.ensure_future(trickle(writer))
            assert await seconds_until_closed(reader) < TIMEOUT_S / 2
            trickling.cancel()

    run_steadily(run())


def test_half_head_behind_a_whole_one_is_closed() -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST + HALF)
            await read_answer(reader)
            assert await seconds_until_closed(reader) < TIMEOUT_S / 2

    run_steadily(run())


def test_idle_connection_is_kept_as_long_as_uvicorn_does() -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, writer = await clients.connect()
            for _ in range(2):
                writer.write(REQUEST)
                await read_answer(reader)
            assert await seconds_until_closed(reader) >= KEEP_ALIVE_S - 0.1

    run_steadily(run())


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_responses_may_take_longer_than_heads(num_at_once: int) -> None:
    async def run() -> None:
        async with clients_of(slow) as clients:
            reader, writer = await clients.connect()
            writer.write(num_at_once * REQUEST)
            for _ in range(num_at_once):
                await read_answer(reader)

    run_steadily(run())


def test_connection_that_leaves_response_unread_is_closed() -> None:
    async def run() -> None:
        async with clients_of(long) as clients:
            _, writer = await clients.connect()
            writer.write(REQUEST)
            await until(lambda: clients.num_served == 1)
            await until(lambda: clients.num_served == 0)

    run_steadily(run())


def test_unread_stream_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with clients_of(endless) as clients:
            _, writer = await clients.connect()
            writer.write(REQUEST)
            await until(lambda: clients.num_served == 1)
            await until(lambda: clients.num_served == 0)

    run_steadily(run())
    assert f"read nothing for {CLIENT_TIMEOUT_S:g} s" in caplog.text


def test_client_that_reads_now_and_then_is_served_on() -> None:
    async def run() -> None:
        async with clients_of(endless) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST)
            started_s = monotonic()
            while monotonic() < started_s + 4 * CLIENT_TIMEOUT_S:
                await reader.readexactly(MORE_THAN_BUFFERS_HOLD // 4)
                await asyncio.sleep(CLIENT_TIMEOUT_S / 4)
            assert clients.num_served == 1

    run_steadily(run())


@pytest.mark.parametrize("app", [long, burst])
def test_large_bodies_may_be_read_slowly(app: ASGIApp) -> None:
    limit_s = 3 * CLIENT_TIMEOUT_S
    num_parts = 64

    async def run() -> None:
        async with clients_of(app, limit_s) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST)
            for _ in range(num_parts):
                await reader.readexactly(MORE_THAN_BUFFERS_HOLD // num_parts)
                await asyncio.sleep((KEEP_ALIVE_S + 1.5 * limit_s) / num_parts)

    run_steadily(run())


def test_request_behind_an_unread_response_is_aborted() -> None:
    async def run() -> None:
        async with clients_of(long) as clients:
            _, writer = await clients.connect()
            writer.write(REQUEST)
            await until(lambda: clients.num_served == 1)
            await asyncio.sleep(CLIENT_TIMEOUT_S / 2)  # the response is complete, and unread
            writer.write(REQUEST)
            await until(lambda: clients.num_served == 0)

    run_steadily(run())


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_written_parts_have_same_bytes_as_sent_ones(num_at_once: int) -> None:
    async def answer(app: ASGIApp) -> bytes:
        async with clients_of(app) as clients:
            reader, writer = await clients.connect()
            writer.write(num_at_once * REQUEST)
            got = b""
            while got.count(b"\r\n0\r\n\r\n") < num_at_once:
                got += await reader.read(2**16)
            return b"".join(line for line in got.splitlines(True) if not line.startswith(b"date:"))

    asked, direct = run_steadily(answer(sent)), run_steadily(answer(written))
    assert direct == asked
    assert direct.count(b"HTTP/1.1 200 ") == num_at_once


@pytest.mark.parametrize(
    ("head", "is_written"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"yes!"),
        (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b"no.."),
        (b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"no.."),
    ],
)
def test_parts_are_written_where_bodies_are_chunked(head: bytes, is_written: bytes) -> None:
    async def run() -> None:
        async with clients_of(which) as clients:
            reader, writer = await clients.connect()
            writer.write(head)
            assert b"is: " + is_written in await reader.readuntil(b"\r\n\r\n")

    run_steadily(run())


def test_parts_are_not_written_to_full_or_lost_connections() -> None:
    written = list[bool]()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        writer = scope[STREAM_WRITER]
        await send({"type": "http.response.start", "status": 200})
        parts = (bytes(MAX_PART_BYTES) for _ in range(MORE_THAN_BUFFERS_HOLD // MAX_PART_BYTES))
        written.append(all(writer.write(part) for part in parts))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})  # when the client has read
        written.append(writer.write(b"x"))
        await receive_disconnect(receive)
        written.append(writer.write(b"x"))

    async def run() -> None:
        async with clients_of(flood, TIMEOUT_S) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST)
            await until(lambda: len(written) == 1)
            while len(written) < 2:
                await reader.read(2**16)
            writer.transport.abort()
            await until(lambda: len(written) == 3)

    run_steadily(run())
    assert written == [False, True, False]


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond before the body is there."""
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def refuse_late(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await refuse(scope, receive, send)


CHUNKED: Final = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"


@pytest.mark.parametrize(
    ("app", "parts", "status", "reason"),
    [
        (short, [b"hello\r\n\r\n"], b"400 Bad Request\r\n", "illegal request line"),
        (short, [b"GET / HTTP/1.1\r\n\r\n"], b"400", "Missing mandatory Host: header"),
        (short, [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99)], b"400", "--ssl-certfile"),
        (short, [REQUEST[:-2] + b"X: " + b"x" * 2**16], b"431", "Receive buffer too long"),
        (refuse_late, [CHUNKED, b"zz\r\n"], b"400", "illegal chunk header"),
        (refuse, [CHUNKED, b"zz\r\n"], b"403", "illegal chunk header"),
    ],
    ids=["greeting", "no host", "TLS", "large head", "chunk", "chunk after response"],
)
def test_malformed_requests_are_answered_and_logged_once(
    app: ASGIApp, parts: list[bytes], status: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with clients_of(app, TIMEOUT_S) as clients:
            for _ in range(3):
                reader, writer = await clients.connect()
                answer = b""
                for part in parts:
                    writer.write(part)
                    answer += await reader.read(2**16) if app is refuse and not answer else b""
                answer += await reader.read()
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert app is refuse or reason.encode() in answer

    asyncio.run(run())
    [line] = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1" in line
    assert reason in line


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_offers_of_other_protocols_are_ignored(protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST[:-2] + b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n")
            await read_answer(reader)

    asyncio.run(run())
    assert not caplog.records


def test_head_has_the_response_to_get_without_body() -> None:
    async def run() -> None:
        async with clients_of(short) as clients:
            reader, writer = await clients.connect()
            writer.write(REQUEST.replace(b"GET", b"HEAD"))
            assert b"content-length: 4\r\n" in await reader.readuntil(b"\r\n\r\n")
            writer.write(REQUEST)
            await read_answer(reader)

    asyncio.run(run())
