"""A server in its own process, and requests to it."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from types import GenericAlias
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from tests.cpu.server.forked import ForkedProcess, asked_for, templates

START_TIMEOUT_S = 600.0
TIMEOUT_S = 300.0
"""Waits end when the thing happens: only a server that hangs takes so long, or a machine with much else to do."""

http_get = partial(httpx.get, timeout=TIMEOUT_S)
http_post = partial(httpx.post, timeout=TIMEOUT_S)
http_stream = partial(httpx.stream, timeout=TIMEOUT_S)

ENDING_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.execv(sys.argv[1], sys.argv[1:])
"""

Found = TypeVar("Found")
Start = Callable[[Sequence[str], Mapping[str, str], int], "subprocess.Popen[bytes] | ForkedProcess"]


def fork_server(
    arguments: Sequence[str], environment: Mapping[str, str], output: int, module: str = "strandline"
) -> ForkedProcess:
    """Fork the command line's process from one that has done its imports, and its engines' processes likewise."""
    descriptors = {1: output, 2: output}
    return ForkedProcess(templates().front_ends, module, arguments, descriptors, environment=environment)


def fork_server_with_held_restarts(may_restart: Path) -> Start:
    """Return what forks a server whose engines are restarted once a file exists."""

    def start(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess:
        return fork_server([str(may_restart), *arguments], environment, output, "tests.cpu.server.held_restarts")

    return start


class ForkedServer(ForkedProcess):
    """Stands for ``subprocess.Popen`` where an example starts servers and reads their log."""

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self, command: Sequence[str], *, stderr: int, text: bool) -> None:
        assert (command[:3], stderr, text) == ([sys.executable, "-m", "strandline"], subprocess.PIPE, True)
        reader, writer = os.pipe()
        try:
            super().__init__(templates().front_ends, command[2], command[3:], {1: 1, 2: writer})
        finally:
            os.close(writer)
        self.stderr = os.fdopen(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(TIMEOUT_S)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


def ending_with_parent(command: Sequence[str | Path]) -> list[str]:
    """Return a command that becomes another one, which is killed when the process that started it ends."""
    return [sys.executable, "-S", "-c", ENDING_WITH_PARENT, *map(str, command)]


def execute_server(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> "subprocess.Popen[bytes]":
    """Run the command as users do."""
    command = ending_with_parent([Path(sys.executable).with_name("strandline"), *arguments])
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


class ServerProcess:
    """``strandline serve`` on a free port.

    Args:
        start: runs a command with an environment, its output in a file.
    """

    def __init__(self, model: Path, log: Path, *flags: str, start: Start = fork_server) -> None:
        arguments = ["serve", str(model), "--port", "0", "--device", "cpu", "--memory", "16MiB"]
        # No pings unless a test sets an interval: on a busy machine they would come between the expected events.
        arguments += ["--served-model-name", "tiny", "--stream-ping-interval-s", "0", *flags]
        self._log = log
        with log.open("wb") as file:
            self.process = start(arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, file.fileno())
        self.url = ""

    def wait_until_it_serves(self) -> Self:
        """Wait for the line that names the address."""
        line = re.compile(r"serving tiny on ([^\s\"]+)[\"\n]")
        self.wait_until(lambda: line.search(self.log()) or self.process.poll() is not None, START_TIMEOUT_S)
        found = line.search(self.log())
        assert found, self.log()
        self.url = found[1]
        return self

    def wait_until(self, find: Callable[[], Found], timeout_s: float = TIMEOUT_S) -> Found:
        """Poll until something is true, and return it: at another look it might have changed again."""
        deadline = monotonic() + timeout_s
        while not (found := find()):
            assert monotonic() < deadline, f"not so within {timeout_s} s; the server's log:\n{self.log()}"
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        return found

    def log(self) -> str:
        return self._log.read_text()

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return http_post(self.url + path, json=fields)

    def get(self, path: str) -> httpx.Response:
        return http_get(self.url + path)

    def connect(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname or "", address.port or 0), timeout=TIMEOUT_S)

    def raw(self, request: bytes) -> tuple[int, str]:
        """Send bytes; return the status, and all that comes until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            with connection.makefile("rb") as file:
                answer = file.read().decode("latin-1")
        return int(answer.split()[1]), answer

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[Iterator[str]]:
        """Yield the data of a completion's events."""
        body = {"stream": True, **fields}
        with http_stream("POST", f"{self.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))

    def metrics(self) -> str:
        """Return all metrics, once each engine has answered: on a busy machine, samples of a late one are left out."""

        def complete() -> str:
            text = self.get("/metrics").text
            return "" if 0.0 in _values(text, "engine_up") else text

        return self.wait_until(complete)

    def metric(self, name: str) -> float:
        """Return a metric's value, summed over its labels."""
        return self._sums(name)[0]

    def _sums(self, *names: str) -> list[float]:
        text = self.metrics()
        values = {name: _values(text, name) for name in names}
        assert all(values.values()), f"metrics without a sample: {[name for name in names if not values[name]]}"
        return [sum(values[name]) for name in names]

    def growth_of(self, *names: str) -> Callable[[], list[float]]:
        """Wait until the server is idle; return what returns by how much metrics have grown since.

        A metric need not have a sample yet.
        """
        self.wait_until_idle()
        text = self.metrics()
        before = [sum(_values(text, name)) for name in names]
        return lambda: [new - old for new, old in zip(self._sums(*names), before, strict=True)]

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits: a request that an earlier test has left ends when the server notices."""
        self.wait_until(lambda: self.get("/load").json() == {"server_load": 0})
        self.wait_until(lambda: sum(self._sums("num_requests_running", "num_requests_waiting")) == 0)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def core_pid(self) -> int:
        """Wait until the engine's process runs; return its id."""
        return self.core_pids(1)[0]

    def core_pids(self, number: int) -> list[int]:
        """Wait until the processes of this many engines run; return their ids, in the order of their starts."""

        def all_that_run() -> list[int]:
            found = self._core_pids()
            return found if len(found) == number else []

        return self.wait_until(all_that_run)

    def _core_pids(self) -> list[int]:
        if isinstance(self.process, ForkedProcess):
            return asked_for(templates().engines, self.process.pid)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"core_process" in _command_line(pid)]

    def exit_code(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _values(metrics: str, name: str) -> list[float]:
    """Return the values of a metric's samples."""
    found: list[str] = re.findall(rf"^strandline:{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
    return [float(value) for value in found]


def _command_line(pid: str) -> bytes:
    """Return a process's command line; b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@contextmanager
def running_server(model: Path, log: Path, *flags: str, start: Start = fork_server) -> Iterator[ServerProcess]:
    """Yield a server that serves; end it afterwards."""
    server = ServerProcess(model, log, *flags, start=start)
    try:
        yield server.wait_until_it_serves()
    finally:
        server.close()
