"""Two servers and a proxy: answers as from one server, whatever happens to the one that computes prompts."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn

from tests.cpu.server.prefill_decode_proxy import build_proxy
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

TEXT = "A prompt that is long enough to fill several blocks of sixty-four tokens, where each token is a byte. " * 3
LEASE_S = 2.0
"""Short: a prompt whose lease has expired is fetched as what is cached."""


def flags(role: str, **extra: Any) -> list[str]:
    config = {"kv_connector": "SocketConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


@pytest.fixture(scope="module")
def producer(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("producer") / "log"
    with running_server(bytes_dir, log, *flags("kv_producer", lease_s=LEASE_S)) as server:
        yield server


@pytest.fixture(scope="module")
def consumer(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("consumer") / "log"
    with running_server(bytes_dir, log, *flags("kv_consumer")) as server:
        yield server


@contextmanager
def running_proxy(producer: ServerProcess, consumer: ServerProcess) -> Iterator[str]:
    """Yield the address of a proxy that runs in a thread."""
    config = uvicorn.Config(build_proxy(producer.url, consumer.url, TIMEOUT_S), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run)
    thread.start()
    try:
        consumer.wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def proxy(producer: ServerProcess, consumer: ServerProcess) -> Iterator[str]:
    with running_proxy(producer, consumer) as url:
        yield url


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "include_cache_account": True, **fields}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_completions_through_a_proxy_are_those_of_one_server(proxy: str, server: ServerProcess) -> None:
    body = body_of("completion " + TEXT)
    answer = post(proxy, "/v1/completions", body)
    assert answer["choices"] == post(server.url, "/v1/completions", body)["choices"]
    assert answer["usage"]["cache"]["hit"] == answer["usage"]["prompt_tokens"]
    assert "kv_transfer_params" not in answer


def test_chats_through_a_proxy_are_those_of_one_server(proxy: str, server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "chat " + TEXT}],
        "max_completion_tokens": 12,
        "temperature": 0,
        "include_cache_account": True,
    }
    answer = post(proxy, "/v1/chat/completions", body)
    alone = post(server.url, "/v1/chat/completions", body)
    assert answer["choices"] == alone["choices"]
    assert answer["usage"]["cache"]["hit"] == answer["usage"]["prompt_tokens"]


def test_streams_through_a_proxy_are_those_of_one_server(proxy: str, server: ServerProcess) -> None:
    body = body_of("stream " + TEXT, stream=True, stream_options={"include_usage": True})
    texts = []
    for url in (proxy, server.url):
        lines = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts.append("".join(choice["text"] for event in events for choice in event["choices"]))
    assert texts[0] == texts[1] != ""


def prefill(producer: ServerProcess, prompt: str) -> dict[str, Any]:
    body = body_of(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params: dict[str, Any] = post(producer.url, "/v1/completions", body)["kv_transfer_params"]
    return params


def test_the_params_say_where_and_what(producer: ServerProcess) -> None:
    params = prefill(producer, "params " + TEXT)
    assert params["remote_num_tokens"] == len("params " + TEXT)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    line = f"prefixes: given on {params['remote_host']}:{params['remote_port']}; this is engine"
    assert f"{line} {params['remote_engine_id']}" in producer.log()


@pytest.mark.parametrize(
    ("to", "params", "message"),
    [
        ("consumer", {"do_remote_decode": True}, "in the role kv_producer or kv_both"),
        (
            "producer",
            {"do_remote_prefill": True, "remote_host": "localhost", "remote_port": 1},
            "in the role kv_consumer",
        ),
        ("server", {"do_remote_decode": True}, "needs a server with --kv-transfer-config"),
        ("consumer", {"do_remote_prefill": True}, "needs remote_host and remote_port"),
        (
            "consumer",
            {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1},
            "is not among the peers",
        ),
        ("consumer", {"do_remote_prefill": "yes"}, "do_remote_prefill must be of type bool"),
        ("consumer", {"do_remote_prefill": True, "do_remote_decode": True}, "exclude each other"),
    ],
)
def test_what_is_not_served_is_refused(
    request: pytest.FixtureRequest, to: str, params: dict[str, Any], message: str
) -> None:
    answer = request.getfixturevalue(to).post("/v1/completions", prompt="a", kv_transfer_params=params)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_params_that_ask_for_nothing_are_taken_everywhere(server: ServerProcess) -> None:
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False, "remote_host": None}):
        assert server.post("/v1/completions", prompt="a", kv_transfer_params=params).status_code == 200


def test_several_prompts_are_not_handed_over(producer: ServerProcess) -> None:
    params = {"do_remote_decode": True}
    answer = producer.post("/v1/completions", prompt=["a", "b"], kv_transfer_params=params)
    assert answer.status_code == 400
    assert "needs one prompt, got 2" in answer.json()["error"]["message"]


def kill(server: ServerProcess) -> None:
    """Kill both processes of a server at once."""
    os.kill(server.core_pid(), signal.SIGKILL)
    server.signal(signal.SIGKILL)
    server.exit_code()


def bytes_in_use(server: ServerProcess) -> float:
    """Return how much of a server's memory neither is free nor could be evicted."""
    found = re.findall(r'cache_memory_bytes\{.*tenant="\w+_in_use".*\} (\S+)', server.get("/metrics").text)
    assert len(found) == 2
    return sum(map(float, found))


def test_answers_stay_the_same_when_either_side_is_killed(
    bytes_dir: Path, tmp_path: Path, server: ServerProcess, producer: ServerProcess, consumer: ServerProcess
) -> None:
    prompts = [f"{index} killed " + TEXT for index in range(3)]
    alone = [post(server.url, "/v1/completions", body_of(prompt))["choices"] for prompt in prompts]
    with running_server(bytes_dir, tmp_path / "log", *flags("kv_both")) as lost:
        fetched = post(
            lost.url, "/v1/completions", body_of(prompts[0], kv_transfer_params=prefill(producer, prompts[0]))
        )
        assert (fetched["choices"], fetched["usage"]["cache"]["hit"]) == (alone[0], len(prompts[0]))
        params = [prefill(lost, prompts[1]), prefill(producer, prompts[2])]
        with running_proxy(lost, consumer) as url:
            kill(lost)
            answer = post(consumer.url, "/v1/completions", body_of(prompts[1], kv_transfer_params=params[0]))
            assert answer["choices"] == alone[1]
            [miss] = answer["usage"]["cache"]["misses"]
            assert (miss["reason"], miss["tokens"]) == ("load_failed", len(prompts[1]))
            assert post(url, "/v1/completions", body_of(prompts[0]))["choices"] == alone[0]
    answer = post(consumer.url, "/v1/completions", body_of(prompts[2], kv_transfer_params=params[1]))
    assert (answer["choices"], answer["usage"]["cache"]["hit"]) == (alone[2], len(prompts[2]))
    assert bytes_in_use(consumer) == 0


def test_an_idle_producer_keeps_nothing_after_its_leases(producer: ServerProcess) -> None:
    prefill(producer, "idle " + TEXT)
    producer.wait_until(lambda: bytes_in_use(producer) == 0)
