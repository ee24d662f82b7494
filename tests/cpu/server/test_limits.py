"""Limits of the server: keys, queue, sizes, timeouts."""

import hmac
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from strandline.server.http import gate
from tests.cpu.server.process import ServerProcess, http_get, http_post, http_stream, running_server

FLAGS = ["--api-key", "secret-one", "secret-two", "--max-num-seqs", "1", "--max-queue", "1"]
FLAGS += ["--max-body-bytes", "2000"]
KEY = {"Authorization": "Bearer secret-two"}
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(bytes_dir, tmp_path_factory.mktemp("strict") / "log", *FLAGS) as server:
        yield server


def ask(server: ServerProcess, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 1, **fields}
    url = f"{server.url}/v1/completions"
    return http_post(url, json=body, headers=KEY if headers is None else headers)


BAD_HEADERS = ["", "Bearer", "Bearer secret", "Bearer secret-two2", "Basic secret-two", "Bearer \xe9"]


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_a_wrong_key_is_a_401(strict: ServerProcess, header: str) -> None:
    answer = http_post(
        f"{strict.url}/v1/completions", json={"prompt": "x"}, headers=[(b"Authorization", header.encode("latin-1"))]
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_any_key_is_accepted_and_health_needs_none(strict: ServerProcess) -> None:
    for key in ("secret-one", "secret-two"):
        for headers in ({"Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
            assert ask(strict, headers).status_code == 200
    for path in ("/health", "/version", "/metrics", "/load"):
        assert strict.get(path).status_code == 200
    for path in ("/v1/models", "/server_info"):
        assert strict.get(path).status_code == 401


def test_server_info_has_flags_and_no_keys(strict: ServerProcess) -> None:
    answer = http_get(f"{strict.url}/server_info", headers={"Authorization": "Bearer secret-one"})
    info = answer.json()
    assert info["flags"]["device"] == "cpu"
    assert info["flags"]["served_model_name"] == info["models"] == ["tiny"]
    assert [engine["failure"] for engine in info["engines"]] == [None]
    assert "secret" not in answer.text


def test_keys_are_compared_in_constant_time_and_never_logged(
    strict: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "secret" not in strict.log()
    compared, original = [], hmac.compare_digest

    def compare(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return original(given, known)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    door = gate.Gate(lambda *_: None, api_keys={"a": "", "b": ""}, max_body_bytes=1)  # type: ignore[arg-type,return-value]
    assert door._find({b"x-api-key": b"a"}) is not None
    assert compared == [b"a", b"b"]


@pytest.mark.parametrize(
    "headers", [{}, {b"authorization": b"Bearer"}, {b"authorization": b"Bearer  "}, {b"x-api-key": b""}]
)
def test_missing_key_never_equals_an_empty_one(headers: dict[bytes, bytes]) -> None:
    door = gate.Gate(lambda *_: None, api_keys={"": "", "a": ""}, max_body_bytes=1)  # type: ignore[arg-type,return-value]
    assert door._find(headers) is None


def test_too_large_body_gets_413_with_and_without_length(strict: ServerProcess) -> None:
    assert ask(strict, prompt="x" * 3000).status_code == 413
    pieces = (b"x" * 500 for _ in range(10))
    headers = {**KEY, "Content-Type": "application/json"}
    answer = http_post(f"{strict.url}/v1/completions", content=pieces, headers=headers)
    assert answer.status_code == 413
    assert "raise --max-body-bytes" in answer.json()["error"]["message"]


def test_full_queue_gets_429_with_retry_after(strict: ServerProcess) -> None:
    url = f"{strict.url}/v1/completions"
    with http_stream("POST", url, json={**ENDLESS, "n": 2, "stream": True}, headers=KEY) as first:
        lines = first.iter_lines()
        next(lines)
        answer = ask(strict)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    strict.wait_until(lambda: strict.metric("num_requests_running") + strict.metric("num_requests_waiting") == 0)
    assert ask(strict).status_code == 200


def test_what_could_never_be_queued_is_a_400(strict: ServerProcess) -> None:
    answer = ask(strict, n=3)
    assert answer.status_code == 400
    assert "at most 2 may run and wait" in answer.json()["error"]["message"]


def test_a_request_that_takes_too_long_is_ended(bytes_dir: Path, tmp_path: Path) -> None:
    with running_server(bytes_dir, tmp_path / "log", "--request-timeout-s", "0.5") as server:
        answer = server.post("/v1/completions", **ENDLESS)
        assert answer.status_code == 504
        assert "raise --request-timeout-s" in answer.json()["error"]["message"]
        server.wait_until(lambda: server.metric("num_requests_running") == 0)
