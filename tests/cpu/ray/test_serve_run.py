"""The documented deployment, by ``serve run`` and YAML: it answers, is scaled while answers stream, and ends.

Left out where Ray is not installed, as in ``make test``: ``pip install 'strandline[ray]'`` first. Takes minutes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs strandline[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

import yaml  # noqa: E402  # Ray brings it

from tests.cpu.ray.documented import HEADERS, documented, replica_processes  # noqa: E402

SERVE = Path(sys.executable).with_name("serve")
APP = f"documented-{os.getpid()}"
TIMEOUT_S = 400.0
NUM_STREAMS = 6


@dataclass
class Deployment:
    """``serve run`` in a process, and changes to what it runs."""

    folder: Path
    config: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``serve run`` with the YAML."""
        path = self.folder / "deployment.yaml"
        path.write_text(yaml.safe_dump(self.config))
        # In a folder of its own, ``--address auto`` finds this cluster and no other one.
        environment = {**os.environ, "RAY_TMPDIR": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([SERVE, "run", *arguments, path], stdout=log, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Run it, and wait until it answers."""
        self.process = self.run()
        self.wait_until(lambda: self._is_serving() and len(replica_processes(APP)) == 1)

    def scale(self, num_replicas: int) -> None:
        """Change the number of engines as documented, and wait until it is reached."""
        [application] = self.config["applications"]
        application["deployments"] = [{"name": "Engine", "num_replicas": num_replicas}]
        assert self.run("--non-blocking", "--address", "auto").wait(TIMEOUT_S) == 0, self.log
        self.wait_until(lambda: len(replica_processes(APP)) == num_replicas)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Poll until something is so."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < deadline, self.log
            assert self.process is None or self.process.poll() is None, self.log
            time.sleep(0.2)

    def client(self) -> httpx.Client:
        port = self.config["http_options"]["port"]
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=TIMEOUT_S)

    def _is_serving(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/v1/models").is_success
        except httpx.HTTPError:
            return False

    def answer(self, index: int) -> str:
        """Return the streamed answer to a question."""
        text = f"Hello! My name is Ada, and I am number {index}. What is the capital of Italy?"
        body = {"messages": [{"role": "user", "content": text}], "temperature": 1, "seed": index, "stream": True}
        body |= {"max_tokens": 200, "ignore_eos": True}
        with self.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = list(answer.iter_lines())
        assert lines[-2] == "data: [DONE]"
        assert not any('"error"' in line for line in lines)
        return "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', "\n".join(lines)))

    def answers(self) -> list[str]:
        """Return the answers to streams that run together."""
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            return list(threads.map(self.answer, range(NUM_STREAMS)))

    def scale_under_load(self, num_replicas: int, expected: list[str]) -> None:
        """Change the number of engines while answers stream. None may be lost or differ."""
        with ThreadPoolExecutor(1) as thread:
            scaling = thread.submit(self.scale, num_replicas)
            while not scaling.done():
                assert self.answers() == expected
            scaling.result()


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Ray's sockets lie in it, whose paths must be short.
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        config = documented(APP, port)
        config["applications"][0]["args"]["engine"]["disk_cache"] = f"{folder}/cache"
        made = Deployment(Path(folder), config)
        made.start()
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.send_signal(signal.SIGINT)
            made.process.wait(TIMEOUT_S)


def test_the_documented_deployment_answers(deployment: Deployment) -> None:
    with deployment.client() as client:
        body = {"messages": [{"role": "user", "content": "Hello! My name is Ada."}], "max_tokens": 8}
        for num_hit in (0, 16):
            usage = client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_hit
        assert client.post("/v1/chat/completions", json=body, headers={"Authorization": ""}).status_code == 401


def test_replicas_come_and_go_while_answers_stream(deployment: Deployment) -> None:
    expected = deployment.answers()
    assert len(set(expected)) > 1
    [first] = replica_processes(APP)
    deployment.scale_under_load(2, expected)
    assert first in replica_processes(APP), "those that were there keep their caches"
    [second] = {*replica_processes(APP)} - {first}

    def second_has_run() -> bool:
        assert deployment.answers() == expected
        return re.search(rf"Engine pid={second}\).*CALL run OK", deployment.log) is not None

    deployment.wait_until(second_has_run)
    deployment.scale_under_load(1, expected)
    assert deployment.answers() == expected


def test_ctrl_c_ends_all_replicas_and_leaves_their_caches(deployment: Deployment) -> None:
    assert deployment.process is not None
    left = {*deployment.folder.glob("cache/*/*.snapshot")}
    deployment.process.send_signal(signal.SIGINT)
    deployment.process.wait(TIMEOUT_S)
    deployment.process = None
    deployment.wait_until(lambda: not replica_processes(APP))
    assert {*deployment.folder.glob("cache/*/*.snapshot")} > left
