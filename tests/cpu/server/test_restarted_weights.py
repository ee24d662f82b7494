"""Engines that are restarted after weights have changed: no request is answered with other weights than the newest."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.cpu.engine.tiny import save_tiny_model
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.process import ServerProcess, running_server
from tests.cpu.server.test_admin import GENERATE, PROMPT, generate, tokens

FLAGS = ("--data-parallel-size", "2", "--restart", "--enable-admin-endpoints")


def kill(server: ServerProcess, engine: int) -> None:
    """Kill an engine's process, and wait until another one runs."""
    old = server.core_pids(2)[engine]
    os.kill(old, signal.SIGKILL)
    server.wait_until(lambda: server.get("/health").status_code == 503)
    server.wait_until(lambda: server.get("/health").status_code == 200)


def versions(server: ServerProcess) -> list[tuple[str, bool]]:
    engines: list[dict[str, Any]] = server.get("/server_info").json()["engines"]
    return [(engine["weight_version"], engine["has_current_weights"]) for engine in engines]


def update(server: ServerProcess, directory: Path, version: str) -> None:
    body = {"model_path": str(directory), "weight_version": version}
    assert server.post("/update_weights_from_disk", **body).status_code == 200


def answers(server: ServerProcess) -> list[tuple[list[int], str]]:
    """Return what requests that are spread over the engines are answered, and with which weights."""
    found = [generate(server, cache_salt=salt) for salt in "abcd"]
    return [(tokens(each), each["weight_version"]) for each in found]


def test_engine_that_restarts_answers_once_it_has_the_weights(bytes_dir: Path, tmp_path: Path) -> None:
    other_dir = save_tiny_model(tmp_path / "other", seed=2, vocab_size=VOCAB_SIZE)
    with running_server(bytes_dir, tmp_path / "log", *FLAGS) as server:
        before = tokens(generate(server))
        update(server, other_dir, "step-1")
        [first, *others] = answers(server)
        assert first[1] == "step-1"
        assert first[0] != before
        assert others == [first] * 3
        kill(server, 1)
        assert versions(server) == [("step-1", True), ("default", False)]
        assert answers(server) == [first] * 4
        assert 'engine="1",model_name="tiny",weight_version="default"} 1.0' in server.metrics()
        assert "engine 1 gets no requests" in server.log()
        server.post("/sleep?level=2&mode=keep")
        server.post("/wake_up")
        assert answers(server) == [first] * 4
        kill(server, 0)
        refused = server.post(GENERATE, token_ids=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stale_weights")
        assert server.get("/weight_info").json() == {"weight_version": "default"}
        update(server, other_dir, "step-2")
        assert versions(server) == [("step-2", True)] * 2
        assert answers(server) == [(first[0], "step-2")] * 4
