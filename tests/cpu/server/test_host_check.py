"""Requests by foreign host names are refused, and never see the text of prompts."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, Final

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from strandline.errors import ConfigError
from strandline.records.cache_questions import CacheState, RecentHits
from strandline.records.events import CoreStats
from strandline.records.tree_view import TreeView
from strandline.server.cache_page import add_cache_page
from strandline.server.config import ServerConfig
from strandline.server.http.host_check import HostCheck
from strandline.server.http.host_names import is_local, parse_host
from strandline.server.requests.service import Service
from tests.cpu.server.process import ServerProcess

LOCAL: Final = ("localhost", "LocalHost:80", "localhost.", "127.0.0.1", "127.0.0.2:8000", "127.0.0.1.", "[::1]:65535")
FOREIGN: Final = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[::2]:80", "_a-b.c")
MALFORMED: Final = (
    b"a{b}.evil.example",
    b'a"b.evil.example',
    b"a`b",
    b"",
    b":80",
    b"localhost:",
    b"localhost:99999999",
    b"localhost:65536",
    b"localhost:8o",
    b"localhost:80:80",
    b"localhost..",
    b".localhost",
    b"user@localhost",
    b"localhost/",
    b"localhost localhost",
    b"localhost, localhost",
    b"localhost\n",
    "lócalhost".encode(),
    "１27.0.0.1".encode(),
    b"localhost\xff",
    b"::1",
    b"[::1",
    b"[]",
    b"[localhost]",
)


async def ask(app: Any, *hosts: bytes, path: str = "/", type: str = "http") -> tuple[int, bytes]:
    """Send a request with these ``Host`` fields to an application; return its status and its body."""
    sent: list[Message] = []
    scope: Scope = {
        "type": type,
        "method": "GET",
        "path": path,
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", host) for host in hosts],
        "server": ("127.0.0.1", 8000),
        "scheme": "http",
    }

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})


def passes(allowed: set[str], *hosts: bytes) -> bool:
    status, body = asyncio.run(ask(HostCheck(inner, allowed=allowed), *hosts))
    assert (status, status == 403) in ((200, False), (403, json.loads(body or "{}").get("error") is not None))
    return status == 200


@pytest.mark.parametrize("host", LOCAL)
def test_local_names_always_pass(host: str) -> None:
    name = parse_host(host.encode())
    assert name is not None
    assert is_local(name)
    assert passes(set(), host.encode())


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_pass_only_if_allowed(host: str) -> None:
    name = parse_host(host.encode())
    assert name is not None
    assert not is_local(name)
    assert not passes({"other.example", "*.evil"}, host.encode())
    assert passes({name}, host.encode().upper())
    assert passes({"*"}, host.encode())


@pytest.mark.parametrize("field", MALFORMED)
def test_malformed_host_is_foreign(field: bytes) -> None:
    assert parse_host(field) is None
    assert not passes({"a{b}.evil.example", "*.evil.example", "*.localhost", ""}, field)


def test_request_must_have_exactly_one_host() -> None:
    assert not passes(set())
    assert not passes(set(), b"localhost", b"localhost")
    assert not passes(set(), b"localhost", b"evil.example")


def test_wildcard_allows_names_below_it_alone() -> None:
    assert passes({"*.example.com"}, b"a.b.example.com:8000")
    assert not passes({"*.example.com"}, b"example.com")
    assert not passes({"*.example.com"}, b"evilexample.com")


def test_error_names_host_and_flag_in_shape_of_path() -> None:
    check = HostCheck(inner, allowed=())
    for path, kind in (("/v1/completions", "invalid_request_error"), ("/v1/messages", "permission_error")):
        status, body = asyncio.run(ask(check, b"evil.example", path=path))
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (403, kind, "host_not_allowed")
        assert "'evil.example'" in error["message"]
        assert "--allowed-hosts" in error["message"]


def test_servers_on_loopback_check_by_default() -> None:
    for address in ("127.0.0.1", "127.3.2.1", "::1"):
        assert ServerConfig(host="My-Machine").allowed_names(address) == {"my-machine"}
    for address in ("0.0.0.0", "::", "10.0.0.1"):
        assert ServerConfig().allowed_names(address) == {"*"}
        checked = ServerConfig(host=address, allowed_hosts=["API.example.", "[fe80::1]", "*.b"])
        assert checked.allowed_names(address) == {address, "api.example", "fe80::1", "*.b"}


@pytest.mark.parametrize(
    "name", ["api.example:80", "http://api.example", "a*.b", "", "*.", "a{b}", "ä.example", "\udcff"]
)
def test_allowed_hosts_must_be_names(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts must be names without ports"):
        ServerConfig(allowed_hosts=["localhost", name])


class EmptyCache:
    """Stands in for the engines' client, and for its only engine: shows a cache with nothing in it."""

    number, failure = 0, None

    def __init__(self) -> None:
        self.frontend = SimpleNamespace(tokenizer=None)
        self.engines = [self]

    async def show_cache(self, salt: str) -> CacheState:
        stats = CoreStats(0, 0, 0, 0, 0, {}, {}, {}, 0, 0, 0, {})
        return CacheState(True, "auto", 0, 0, 0, stats, RecentHits(0, 0, 0), TreeView((), (), 0, 0, 0, 0), [], [])


@pytest.mark.parametrize(
    ("hosts", "shows_text"),
    [
        *(([host.encode()], True) for host in LOCAL),
        *(([host.encode()], False) for host in FOREIGN),
        *(([field], False) for field in MALFORMED),
        ([], False),
        ([b"localhost", b"evil.example"], False),
    ],
)
def test_page_shows_text_to_local_names_alone(hosts: list[bytes], *, shows_text: bool) -> None:
    app = FastAPI()
    add_cache_page(app, Service(EmptyCache(), ["tiny"]), "local")  # type: ignore[arg-type]
    status, body = asyncio.run(ask(HostCheck(app, allowed={"*"}), *hosts, path="/cache/state"))
    assert (status, json.loads(body)["shows_text"]) == (200, shows_text)


CLOSE: Final = "Connection: close\r\n\r\n"


@pytest.mark.parametrize("path", ["/health", "/cache", "/cache/state", "/v1/models", "/nowhere"])
@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("LOCALHOST:PORT", True),
        ("localhost.", True),
        ("127.0.0.1:PORT", True),
        ("[::1]:PORT", True),
        ("evil.example", False),
        ("a{b}.evil.example:PORT", False),
        ("localhost:99999999", False),
        ("evil\xff.example", False),
        ("", False),
    ],
)
def test_server_on_loopback_refuses_foreign_hosts(
    server: ServerProcess, path: str, host: str, *, is_local: bool
) -> None:
    port = server.url.rpartition(":")[2]
    request = f"GET {path} HTTP/1.1\r\nHost: {host.replace('PORT', port)}\r\n{CLOSE}"
    status, answer = server.raw(request.encode("latin-1"))
    assert status == ((404 if path == "/nowhere" else 200) if is_local else 403)
    assert ("host_not_allowed" in answer) == (not is_local)


def test_request_without_host_is_refused(server: ServerProcess) -> None:
    assert server.raw(f"GET /health HTTP/1.0\r\n{CLOSE}".encode())[0] == 403
    assert server.raw(f"GET /health HTTP/1.1\r\n{CLOSE}".encode())[0] in (400, 403)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_request_with_two_hosts_is_refused(server: ServerProcess, version: str) -> None:
    for hosts in (("localhost", "evil.example"), ("evil.example", "localhost"), ("localhost", "localhost")):
        fields = "".join(f"Host: {host}\r\n" for host in hosts)
        assert server.raw(f"GET /cache/state HTTP/{version}\r\n{fields}{CLOSE}".encode())[0] in (400, 403)


def test_absolute_target_does_not_pass_for_a_local_host(server: ServerProcess) -> None:
    for host in ("localhost", "evil.example"):
        target = "http://evil.example/cache/state"
        status, answer = server.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{CLOSE}".encode())
        assert status == 403
        assert "shows_text" not in answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/v1/models", 200),
        ("HTTP://127.0.0.1:8000/v1/models/?a=http://b/c", 200),
        ("https://localhost", 200),
        ("http://localhost/v1%2Fmodels", 200),
        ("http://localhost/http://localhost/v1/models", 404),
        ("http://user@localhost/v1/models", 403),
        ("http:///v1/models", 403),
    ],
)
def test_absolute_target_names_host_and_path(server: ServerProcess, target: str, status: int) -> None:
    for host in ("localhost", "evil.example"):
        answer = server.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{CLOSE}".encode())
        assert answer[0] == status, answer
