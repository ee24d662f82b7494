"""The load generator's transport: bodies however they are framed and torn, and connections that are used again."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from strandline.bench.serving.stream_transport import StreamTransport

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TIMEOUT_S = 60.0
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
SIZED = OK + b"Content-Length: 5\r\n\r\nabcde"
UNTIL_CLOSED = OK + b"\r\nabcde"
PROVISIONAL = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"


def sends(*parts: bytes, closes: bool = False) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if closes:
            writer.close()

    return answer


class Server:
    """Answers the requests of each connection in turn; notes which connection each came on."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.connections: list[int] = []
        self._num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number = self._num_connections
        try:
            while self._answers and await reader.read(1 << 16):
                self.connections.append(number)
                await self._answers.pop(0)(reader, writer)
            await reader.read()
        finally:
            writer.close()


def fetch(server: Server, num_requests: int = 1, read_s: float = TIMEOUT_S) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/path?q=1"
        async with listening:
            timeout = httpx.Timeout(TIMEOUT_S, read=read_s)
            async with httpx.AsyncClient(transport=StreamTransport(), timeout=timeout) as client:
                found = [await client.post(url, content=b"{}") for _ in range(num_requests)]
            await asyncio.sleep(0.01)  # the server notices that its client has left
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("raw", [CHUNKED, SIZED, PROVISIONAL + SIZED], ids=["chunked", "sized", "provisional"])
def test_bodies_may_be_torn_anywhere(raw: bytes, size: int) -> None:
    parts = [raw[start : start + size] for start in range(0, len(raw), size)]
    [response] = fetch(Server(sends(*parts)))
    assert (response.status_code, response.content) == (200, b"abcde")


def test_body_without_length_ends_with_its_connection() -> None:
    server = Server(sends(UNTIL_CLOSED, closes=True), sends(SIZED))
    assert [response.content for response in fetch(server, 2)] == [b"abcde"] * 2
    assert server.connections == [1, 2]


def test_connection_is_used_again() -> None:
    server = Server(sends(CHUNKED), sends(SIZED), sends(CHUNKED))
    assert [response.content for response in fetch(server, 3)] == [b"abcde"] * 3
    assert server.connections == [1, 1, 1]


def test_connection_that_the_server_ends_is_not_used_again() -> None:
    closing = OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nabcde"
    server = Server(sends(closing), sends(SIZED))
    fetch(server, 2)
    assert server.connections == [1, 2]


def test_response_that_nobody_asked_for_is_dropped_with_its_connection() -> None:
    server = Server(sends(SIZED + OK.replace(b"200", b"408") + b"Content-Length: 3\r\n\r\nbad"), sends(SIZED))
    assert [(x.status_code, x.content) for x in fetch(server, 2)] == [(200, b"abcde")] * 2
    assert server.connections == [1, 2]


def test_request_is_sent_again_if_its_idle_connection_was_closed() -> None:
    server = Server(sends(SIZED), sends(closes=True), sends(SIZED))
    assert [response.content for response in fetch(server, 2)] == [b"abcde"] * 2
    assert server.connections == [1, 1, 2]


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", httpx.ReadError),
        (OK + b"Content-Length: 9\r\n\r\nabc", httpx.ReadError),
        (CHUNKED[:-10], httpx.ReadError),
        (b"SSH-2.0\r\n\r\n", httpx.ReadError),
    ],
    ids=["nothing", "short", "torn", "not HTTP"],
)
def test_incomplete_responses_are_errors(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        fetch(Server(sends(raw, closes=True)))


def test_response_that_does_not_begin_is_an_error() -> None:
    with pytest.raises(httpx.ReadTimeout):
        fetch(Server(sends()), read_s=0.05)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://a..b"])
def test_connection_that_cannot_be_made_is_an_error(url: str) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(transport=StreamTransport()) as client:
            await client.get(url)

    with pytest.raises(httpx.ConnectError):
        asyncio.run(run())
