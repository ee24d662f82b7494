"""A proxy between a client and a server: it forces the answers of a session, and records its requests."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.clients.usage import Usage, usage_of

PER_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "date", "server"})
MAX_OTHER_TOKENS = 40
"""Limit of answers that no script forces: a random model would go on to the end of its context."""


@dataclass
class Exchange:
    """A request, and what came of it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    forced: str | None = None
    """The answer that the session's script demanded."""
    turn: int = 0
    status: int = 0
    answer: str = ""
    usage: Usage | None = None


@dataclass
class Script:
    """The answers of a session, each given once, to the requests that can use them.

    Attributes:
        tool: the name of a tool that the requests of the conversation offer, unlike a client's other requests; None:
            every request is one of the conversation.
        answers: the answers that are due, each with the number of its turn.
    """

    tool: str | None
    answers: list[tuple[int, str]] = field(default_factory=list)

    def take(self, body: Mapping[str, Any]) -> tuple[int, str | None]:
        """Return the answer for a request and its turn; the answer is None if the request is another one."""
        is_ours = self.tool is None or self.tool in tool_names(body)
        return self.answers.pop(0) if is_ours and self.answers else (0, None)


def tool_names(body: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that a request offers, in any of the APIs."""
    return [tool.get("function", tool).get("name", "") for tool in body.get("tools") or ()]


def force(path: str, body: dict[str, Any], answer: str | None) -> dict[str, Any]:
    """Return a request with its answer forced, or at most a short one.

    Reasoning is off, because a constraint holds after the reasoning, which a random model never ends.
    """
    if path == "/v1/messages":
        limit, quiet = "max_tokens", {"thinking": {"type": "disabled"}}
    elif path == "/v1/responses":
        limit, quiet = "max_output_tokens", {"reasoning": {"effort": "none"}}
    else:
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        quiet = {"chat_template_kwargs": {"enable_thinking": False}, "include_cache_account": True}
    if answer is None:
        return {**body, **quiet, limit: min(body.get(limit) or MAX_OTHER_TOKENS, MAX_OTHER_TOKENS)}
    return {**body, **quiet, limit: 2000, "structured_outputs": {"choice": [answer]}}


class Proxy(ThreadingHTTPServer):
    """Forwards requests to a server, by a script."""

    daemon_threads = True

    def __init__(self, upstream: str, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream.removeprefix("http://")
        self.script = script
        self.exchanges: list[Exchange] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def record(self, exchange: Exchange) -> bytes | None:
        """Store a request and return the body to send."""
        path = exchange.path.split("?")[0]
        with self.lock:
            self.exchanges.append(exchange)
            if not path.endswith(("/chat/completions", "/responses", "/messages")):
                return None if exchange.body is None else json.dumps(exchange.body).encode()
            exchange.turn, exchange.forced = self.script.take(exchange.body)
        return json.dumps(force(path, exchange.body, exchange.forced)).encode()


class Handler(BaseHTTPRequestHandler):
    """Handles one connection of a client."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_POST(self) -> None:
        body = self._read_body()
        exchange = Exchange(self.command, self.path, dict(self.headers.items()), json.loads(body) if body else None)
        sent = self.server.record(exchange)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in PER_HOP}
        connection = HTTPConnection(self.server.upstream, timeout=600)
        pieces = []
        try:
            connection.request(self.command, self.path, sent, headers)
            response = connection.getresponse()
            exchange.status = response.status
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in PER_HOP:
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while self.command != "HEAD" and (piece := response.read1()):
                pieces.append(piece)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n" if self.command != "HEAD" else b"")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has gone
        finally:
            connection.close()
            exchange.answer = b"".join(pieces).decode("utf-8", "replace")
            exchange.usage = usage_of(exchange.answer)

    do_GET = do_HEAD = do_POST

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)


@contextmanager
def running_proxy(upstream: str, script: Script) -> Iterator[Proxy]:
    """Yield a proxy on a free port."""
    proxy = Proxy(upstream, script)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
