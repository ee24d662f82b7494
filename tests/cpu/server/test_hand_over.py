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

import pytest
import uvicorn

from strandline.errors import RequestError
from strandline.kv_transfer_config import KVTransferConfig, read_kv_transfer_config
from strandline.server.requests.service import Service
from tests.cpu.server.prefill_decode_proxy import build_proxy
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, http_post

TEXT = "A prompt that is long enough to fill several blocks of sixty-four tokens, where each token is a byte. " * 3
LEASE_S = 2.0
"""Short: a prompt whose lease has expired is fetched as what is cached."""


def config_of(role: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "SocketConnector", "kv_role": role, "kv_connector_extra_config": extra}


@pytest.fixture(scope="module")
def servers(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers that start side by side: the one that computes prompts, and the one that continues them."""
    folder = tmp_path_factory.mktemp("servers")
    started = []
    try:
        for index in range(2):
            config = json.dumps(config_of("kv_both", lease_s=LEASE_S))
            flags = "--kv-transfer-config", config, "--enable-admin-endpoints"
            started.append(ServerProcess(bytes_dir, folder / f"log {index}", *flags))
        yield [server.wait_until_it_serves() for server in started]
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="module")
def producer(servers: list[ServerProcess]) -> ServerProcess:
    return servers[0]


@pytest.fixture(scope="module")
def consumer(servers: list[ServerProcess]) -> ServerProcess:
    return servers[1]


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
    response = http_post(url + path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def alone(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a server answers by itself, with an empty cache."""
    answer = post(server.url, path, {**body, "cache_salt": "alone"})
    assert answer["usage"]["cache"]["hit"] == 0
    return answer


def test_completions_through_a_proxy_are_those_of_one_server(proxy: str, consumer: ServerProcess) -> None:
    body = body_of("completion " + TEXT)
    answer = post(proxy, "/v1/completions", body)
    assert answer["choices"] == alone(consumer, "/v1/completions", body)["choices"]
    assert answer["usage"]["cache"]["hit"] == answer["usage"]["prompt_tokens"]
    assert "kv_transfer_params" not in answer


def test_chats_through_a_proxy_are_those_of_one_server(proxy: str, consumer: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "chat " + TEXT}],
        "max_completion_tokens": 12,
        "temperature": 0,
        "include_cache_account": True,
    }
    answer = post(proxy, "/v1/chat/completions", body)
    assert answer["choices"] == alone(consumer, "/v1/chat/completions", body)["choices"]
    assert answer["usage"]["cache"]["hit"] == answer["usage"]["prompt_tokens"]


def test_streams_through_a_proxy_are_those_of_one_server(proxy: str, consumer: ServerProcess) -> None:
    body = body_of("stream " + TEXT)
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = http_post(f"{proxy}/v1/completions", json=stream).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == alone(consumer, "/v1/completions", body)["choices"][0]["text"] != ""


def prefill(producer: ServerProcess, prompt: str) -> dict[str, Any]:
    body = body_of(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params: dict[str, Any] = post(producer.url, "/v1/completions", body)["kv_transfer_params"]
    return params


def test_the_params_say_where_and_what(producer: ServerProcess) -> None:
    params = prefill(producer, "params " + TEXT)
    assert params["remote_num_tokens"] == len("params " + TEXT)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    [line] = re.findall(r"^prefixes: .*$", producer.log(), re.MULTILINE)
    assert f"given on {params['remote_host']}:{params['remote_port']} and fetched" in line
    assert line.endswith(f"this is engine {params['remote_engine_id']}")


PREFILL = {"do_remote_prefill": True, "remote_host": "localhost", "remote_port": 1}


@pytest.mark.parametrize(
    ("role", "params", "num_prompts", "message"),
    [
        ("kv_consumer", {"do_remote_decode": True}, 1, "in the role kv_producer or kv_both"),
        ("kv_producer", PREFILL, 1, "in the role kv_consumer"),
        (None, {"do_remote_decode": True}, 1, "needs a server with --kv-transfer-config"),
        ("kv_both", {"do_remote_prefill": True}, 1, "needs remote_host and remote_port"),
        ("kv_both", {**PREFILL, "remote_num_tokens": -5}, 1, "remote_num_tokens must be at least 0, got -5"),
        ("kv_both", {**PREFILL, "remote_host": "10.1.2.3"}, 1, "is not among the peers"),
        ("kv_both", {"do_remote_prefill": "yes"}, 1, "do_remote_prefill must be of type bool"),
        ("kv_both", {**PREFILL, "do_remote_decode": True}, 1, "exclude each other"),
        ("kv_producer", {"do_remote_decode": True}, 2, "needs one prompt, got 2"),
    ],
)
def test_what_is_not_served_is_refused(
    role: str | None, params: dict[str, Any], num_prompts: int, message: str
) -> None:
    config = None if role is None else read_kv_transfer_config(config_of(role))
    with pytest.raises(RequestError, match=message):
        service_of(config).transfer_params(params, num_prompts)


def service_of(config: KVTransferConfig | None) -> Service:
    """Return a server's service without an engine."""
    client: Any = None
    return Service(client, ["tiny"], kv_transfer=config)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_params_that_ask_for_nothing_are_taken_everywhere(params: dict[str, Any] | None) -> None:
    assert service_of(None).transfer_params(params, 2) is None


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_refusal_is_the_clients_error(consumer: ServerProcess, prompt: str | list[str]) -> None:
    params = {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1}
    answer = consumer.post("/v1/completions", prompt=prompt, kv_transfer_params=params)
    assert answer.status_code == 400
    assert "is not among the peers" in answer.json()["error"]["message"]


def kill(server: ServerProcess) -> None:
    """Kill both processes of a server at once."""
    os.kill(server.core_pid(), signal.SIGKILL)
    server.signal(signal.SIGKILL)
    server.exit_code()


def pulls_ended(server: ServerProcess, outcome: str) -> float:
    """Return how many pulls ended so."""
    found = re.findall(rf'kv_transfer_pulls_total\{{.*outcome="{outcome}".*\}} (\S+)', server.metrics())
    return sum(map(float, found))


def bytes_in_use(server: ServerProcess) -> float:
    """Return how much of a server's memory neither is free nor could be evicted."""
    found = re.findall(r'cache_memory_bytes\{.*use="\w+_in_use".*\} (\S+)', server.metrics())
    assert len(found) == 2
    return sum(map(float, found))


def test_an_idle_producer_keeps_nothing_after_its_leases(producer: ServerProcess) -> None:
    prefill(producer, "idle " + TEXT)
    producer.wait_until(lambda: bytes_in_use(producer) == 0)
    assert producer.metric("kv_transfer_leases") == 0


def test_pauses_say_that_the_cache_stays(producer: ServerProcess) -> None:
    for path, body in (("/pause?clear_cache=true", {}), ("/pause_generation", {"mode": "retract"})):
        answer = producer.post(path, **body)
        assert (answer.status_code, "--kv-transfer-config" in answer.text) == (400, True), answer.text
    assert producer.get("/is_paused").json() == {"is_paused": False}
    assert producer.post("/pause").json() == {"status": "paused"}
    assert producer.post("/resume").json() == {"status": "resumed"}


def test_answers_stay_the_same_when_one_side_is_killed(producer: ServerProcess, consumer: ServerProcess) -> None:
    """The last test of its file: it kills the producer, which before fetches from the consumer."""
    prompts = [f"{index} killed " + TEXT for index in range(3)]
    expected = [alone(consumer, "/v1/completions", body_of(prompt))["choices"] for prompt in prompts]
    fetched = body_of(prompts[0], kv_transfer_params=prefill(consumer, prompts[0]))
    answer = post(producer.url, "/v1/completions", fetched)
    assert (answer["choices"], answer["usage"]["cache"]["hit"]) == (expected[0], len(prompts[0]))
    params = prefill(producer, prompts[1])
    prefill(consumer, prompts[2])
    with running_proxy(producer, consumer) as url:
        kill(producer)
        answer = post(consumer.url, "/v1/completions", body_of(prompts[1], kv_transfer_params=params))
        assert answer["choices"] == expected[1]
        [miss] = answer["usage"]["cache"]["misses"]
        assert (miss["reason"], miss["tokens"]) == ("load_failed", len(prompts[1]))
        assert post(url, "/v1/completions", body_of(prompts[2]))["choices"] == expected[2]
    # The lease of the last prompt, which no engine is left to fetch, ends by itself.
    consumer.wait_until(lambda: bytes_in_use(consumer) == 0)
    # Whether the connection was open already decides what the pull finds.
    consumer.wait_until(lambda: pulls_ended(consumer, "unreachable") + pulls_ended(consumer, "disconnected") == 1)
