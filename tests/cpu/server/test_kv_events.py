"""``strandline serve --kv-events-config``: events reach a router, and the server's metrics count them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.events.resumable import PromptHashes
from strandline.events.subscriber import Subscriber
from tests.cpu.server.process import ServerProcess, running_server

TEXT = "A prompt that is long enough to fill more than one block of sixty-four tokens, as a router would see it."
BUFFER_STEPS = 1
"""So few that a late subscriber has to ask for everything anew."""


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def publishing(bytes_dir: Path, sockets: Path) -> Iterator[ServerProcess]:
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{sockets}/live",
        "replay_endpoint": f"ipc://{sockets}/replay",
        "buffer_steps": BUFFER_STEPS,
    }
    with running_server(bytes_dir, sockets / "log", "--kv-events-config", json.dumps(config)) as server:
        for _ in range(2):
            answer = server.post("/v1/completions", prompt=TEXT, max_tokens=5, temperature=0)
            assert answer.status_code == 200
        yield server


def test_an_idle_server_states_everything_anew(publishing: ServerProcess, sockets: Path) -> None:
    with Subscriber(f"ipc://{sockets}/live", f"ipc://{sockets}/replay") as subscriber:

        def is_complete() -> bool:
            subscriber.follow(0.02)
            return subscriber.catch_up() and subscriber.is_complete

        publishing.wait_until(is_complete)
        body = {"prompt": TEXT, "max_tokens": 1, "include_cache_account": True}
        usage = publishing.post("/v1/completions", **body).json()["usage"]
        tokens = publishing.post("/tokenize", prompt=TEXT).json()["tokens"]
        assert subscriber.index.hit_tokens(PromptHashes(tokens)) == usage["cache"]["hit"] == len(tokens)


def test_metrics_count_published_events(publishing: ServerProcess) -> None:
    metrics = publishing.metrics()
    [published] = [line for line in metrics.splitlines() if line.startswith("strandline:kv_events_published_total{")]
    assert float(published.split()[-1]) > 3
    assert 'strandline:kv_events_dropped_total{engine="0",model_name="tiny"} 0.0' in metrics


def test_the_log_says_where_the_events_are(publishing: ServerProcess, sockets: Path) -> None:
    line = f"cache events: published on ipc://{sockets}/live, replays on ipc://{sockets}/replay"
    assert line in publishing.log()
