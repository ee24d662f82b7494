"""Web pages of other origins: nothing by default, what is configured otherwise, and never the cache page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from strandline.cli import build_parser
from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from tests.cpu.server.process import ServerProcess, http_stream, running_server

APP: Final = "https://app.example"
KEY: Final = {"Authorization": "Bearer k"}
BODY: Final = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def opened(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("origins") / "log"
    flags = ("--allowed-origins", f'["{APP}"]', "--allowed-methods", '["POST", "GET"]', "--api-key", "k")
    with running_server(bytes_dir, log, *flags) as server:
        yield server


def ask(server: ServerProcess, method: str, path: str, origin: str | None = APP, **options: Any) -> httpx.Response:
    headers = {**({"Origin": origin} if origin else {}), **options.pop("headers", {})}
    return httpx.request(method, server.url + path, headers=headers, timeout=300, **options)


def preflight(
    server: ServerProcess, path: str, origin: str = APP, method: str = "POST", **headers: str
) -> httpx.Response:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization, content-type"}
    return ask(server, "OPTIONS", path, origin, headers={**asked, **headers})


def allowed_origin(response: httpx.Response) -> str | None:
    value: str | None = response.headers.get("access-control-allow-origin")
    return value


def test_nothing_is_allowed_by_default(server: ServerProcess) -> None:
    assert preflight(server, "/v1/completions").status_code == 405
    answer = ask(server, "POST", "/v1/completions", json=BODY)
    assert (answer.status_code, allowed_origin(answer)) == (200, None)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
def test_preflight_of_allowed_origin_needs_no_key(opened: ServerProcess, path: str) -> None:
    answer = preflight(opened, path)
    assert (answer.status_code, allowed_origin(answer)) == (200, APP)
    assert {"POST", "GET"} == set(answer.headers["access-control-allow-methods"].split(", "))
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_preflight_of_other_origins_methods_and_hosts_is_refused(opened: ServerProcess) -> None:
    other = preflight(opened, "/v1/completions", "https://evil.example")
    assert (other.status_code, allowed_origin(other)) == (400, None)
    for origin in (APP + ".evil.example", "http://app.example", APP + ":8443", "null"):
        assert allowed_origin(preflight(opened, "/v1/completions", origin)) is None
    assert preflight(opened, "/v1/completions", method="DELETE").status_code == 400
    rebound = preflight(opened, "/v1/completions", Host="evil.example")
    assert (rebound.status_code, allowed_origin(rebound)) == (403, None)


def test_answers_errors_and_streams_can_be_read(opened: ServerProcess) -> None:
    url = f"{opened.url}/v1/completions"
    assert allowed_origin(ask(opened, "POST", "/v1/completions", json=BODY, headers=KEY)) == APP
    without_key = ask(opened, "POST", "/v1/completions", json=BODY)
    assert (without_key.status_code, allowed_origin(without_key)) == (401, APP)
    malformed = ask(opened, "POST", "/v1/completions", content=b"{", headers=KEY)
    assert (malformed.status_code, allowed_origin(malformed)) == (400, APP)
    assert allowed_origin(ask(opened, "GET", "/nowhere", headers=KEY)) == APP
    with http_stream("POST", url, json={**BODY, "stream": True}, headers={**KEY, "Origin": APP}) as response:
        assert allowed_origin(response) == APP
        assert response.read().endswith(b"data: [DONE]\n\n")
    for origin in (None, "https://evil.example"):
        assert allowed_origin(ask(opened, "POST", "/v1/completions", origin, json=BODY, headers=KEY)) is None


@pytest.mark.parametrize("path", ["/cache", "/cache/state", "/cache/explain"])
def test_cache_page_is_read_by_no_other_origin(opened: ServerProcess, path: str) -> None:
    assert allowed_origin(ask(opened, "GET", path, headers=KEY)) is None
    assert preflight(opened, path).status_code in (401, 405)


def serve_config(*flags: str) -> ServerConfig:
    options = build_parser().parse_args(["serve", *flags])
    names = ("allowed_origins", "allow_credentials", "allowed_methods", "allowed_headers")
    return ServerConfig(**{name: getattr(options, name) for name in names})


def test_any_origin_and_credentials_as_vllm_takes_them() -> None:
    given = serve_config("--allowed-origins", '["*"]', "--allow-credentials").cross_origin()
    assert given is not None
    assert (given.origins, given.with_credentials, given.methods, given.headers) == (["*"], True, ("*",), ("*",))
    assert serve_config().cross_origin() is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--allowed-origins", '["https://app.example/"]'], "--allowed-origins must hold values such as"),
        (["--allowed-origins", '["app.example"]'], "--allowed-origins must hold values such as"),
        (["--allowed-origins", '["*"]', "--allowed-methods", '["PO ST"]'], "--allowed-methods must hold"),
        (["--allowed-origins", '["*"]', "--allowed-headers", r'["a\nb"]'], "--allowed-headers must hold"),
        (["--allowed-origins", '[""]'], "--allowed-origins must not be empty or blank"),
        (["--allow-credentials"], "need --allowed-origins"),
        (["--allowed-methods", '["POST"]'], "need --allowed-origins"),
    ],
)
def test_wrong_values_are_refused_by_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_config(*flags)


@pytest.mark.parametrize("text", ["https://app.example", "{}", "[1]", '"*"', "["])
def test_lists_must_be_json(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--allowed-origins", text])
    assert "must be a JSON list of strings" in capsys.readouterr().err
