"""The public proxy ``vllm-router``, unmodified, in front of two servers; runs where its command is on the path.

pip install vllm-router  # in an environment of its own
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_get, http_post

ROUTER = shutil.which("vllm-router")
TEXT = "A prompt that is long enough to fill several blocks of sixty-four tokens, where each token is a byte. " * 3

pytestmark = pytest.mark.skipif(ROUTER is None, reason="needs the command vllm-router")


@pytest.fixture(scope="module")
def servers(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """A server that computes prompts, and one that continues them."""
    folder = tmp_path_factory.mktemp("servers")
    started = []
    try:
        for role in ("kv_producer", "kv_consumer"):
            config = json.dumps({"kv_connector": "SocketConnector", "kv_role": role})
            started.append(ServerProcess(bytes_dir, folder / role, "--kv-transfer-config", config))
        yield [server.wait_until_it_serves() for server in started]
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="module")
def consumer(servers: list[ServerProcess]) -> ServerProcess:
    return servers[1]


@pytest.fixture(scope="module")
def router(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a router in front of both."""
    assert ROUTER is not None
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = (listener.getsockname()[1] for listener in (one, other))
    command = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", servers[0].url, "--decode", servers[1].url]
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT_S
    try:
        while not _is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return http_get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        time.sleep(0.1)
        return False


def hits(server: ServerProcess) -> tuple[float, float]:
    """Return how many prompt tokens a server was asked for, and how many it had cached or fetched."""
    return server.metric("prefix_cache_queries_total"), server.metric("prefix_cache_hits_total")


def post(url: str, path: str, **body: Any) -> httpx.Response:
    response = http_post(url + path, json={"model": "tiny", "temperature": 0, "max_tokens": 12, **body})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("is_streamed", [False, True])
def test_completions_are_whole_hits_with_the_same_text(router: str, consumer: ServerProcess, is_streamed: bool) -> None:
    prompt = f"{is_streamed} " + TEXT
    queries, before = hits(consumer)
    response = post(router, "/v1/completions", prompt=prompt, stream=is_streamed)
    if is_streamed:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
    else:
        text = response.json()["choices"][0]["text"]
    assert hits(consumer) == (queries + len(prompt), before + len(prompt))
    alone = post(consumer.url, "/v1/completions", prompt=prompt, cache_salt="alone").json()
    assert text == alone["choices"][0]["text"] != ""


def test_chats_are_whole_hits_with_the_same_text(router: str, consumer: ServerProcess) -> None:
    messages = [{"role": "user", "content": "chat " + TEXT}]
    queries, before = hits(consumer)
    answer = post(router, "/v1/chat/completions", messages=messages).json()
    num_tokens = answer["usage"]["prompt_tokens"]
    assert hits(consumer) == (queries + num_tokens, before + num_tokens)
    alone = post(consumer.url, "/v1/chat/completions", messages=messages, cache_salt="alone").json()
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
