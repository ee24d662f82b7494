"""``serve deploy`` with the documented YAML on a Ray cluster that runs: it answers, and leaves what it has cached.

Left out where Ray is not installed, as in ``make test``: ``pip install 'strandline[ray]'`` first. Takes minutes.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import httpx
import pytest

pytest.importorskip("ray", reason="needs strandline[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

import yaml  # noqa: E402  # Ray brings it

from tests.cpu.ray.documented import HEADERS, documented, replica_processes  # noqa: E402

SCRIPTS = Path(sys.executable).parent
APP = f"deployed-{os.getpid()}"
TIMEOUT_S = 400.0
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
BODY = {"messages": [{"role": "user", "content": "Hello! My name is Ada."}], "max_tokens": 8}


def free_ports(num: int) -> list[int]:
    """Return ports of this machine that are free."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    """A Ray cluster of one node, started as by ``ray start``, with a token of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._address = f"http://127.0.0.1:{ports['dashboard-port']}"
        self._environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(16)}
        self._environment["RAY_USAGE_STATS_ENABLED"] = "0"
        command = [SCRIPTS / "ray", "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}"]
        command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--object-store-memory=100000000"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    def serve(self, action: str, *arguments: str | Path) -> None:
        """Run ``serve`` with an action."""
        command = [SCRIPTS / "serve", action, "--address", self._address, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        assert done.returncode == 0, done.stderr

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Poll until something is so."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.2)

    def has_started(self) -> bool:
        """Return whether the dashboard can be reached, which takes deployments."""
        try:
            return httpx.get(self._address).status_code > 0
        except httpx.HTTPError:
            return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Ray's sockets lie in it, whose paths must be short.
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            made.wait_until(made.has_started)
            yield made
        finally:
            made.process.send_signal(signal.SIGTERM)
            made.process.wait(TIMEOUT_S)


def test_the_documented_deployment_answers_and_leaves_its_cache(cluster: Cluster, tmp_path: Path) -> None:
    [port] = free_ports(1)
    config = documented(APP, port)
    config["applications"][0]["args"]["engine"]["disk_cache"] = str(tmp_path / "cache")
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(config))
    cluster.serve("deploy", path)

    def is_serving() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=HEADERS).is_success
        except httpx.TransportError:
            return False

    cluster.wait_until(is_serving)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    usage = httpx.post(url, json=BODY, headers=HEADERS, timeout=TIMEOUT_S).raise_for_status().json()["usage"]
    assert usage["completion_tokens"] == 8
    assert not list(tmp_path.glob("cache/0/*.snapshot"))
    assert len(replica_processes(APP)) == 1
    cluster.serve("shutdown", "--yes")
    cluster.wait_until(lambda: not replica_processes(APP))
    assert list(tmp_path.glob("cache/0/*.snapshot"))
