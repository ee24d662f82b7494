"""Processes that templates fork, used as if ``subprocess.Popen`` had started them."""

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 600.0
LOOK_S = 0.05
MAX_MESSAGE = 2**18


class Wanted(NamedTuple):
    """What a process should be: the first message on a connection, with descriptors."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    numbers: list[int]
    """Numbers of the descriptors in the process."""
    asker: int
    """The id of the process that asks."""


class Question(NamedTuple):
    """Asks for the ids of the processes that a process has asked for and that run, in the order of their starts."""

    asker: int


class ForkedProcess:
    """A process that a template forked.

    Args:
        template: the address of the template.
        descriptors: descriptors that the process gets, by their numbers there.
        environment: None: that of this process.
        has_pipe: whether its standard input is a pipe, which this process may close.
    """

    def __init__(
        self,
        template: str,
        module: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        *,
        environment: Mapping[str, str] | None = None,
        has_pipe: bool = False,
    ) -> None:
        self.args = [sys.executable, "-m", module, *arguments]
        self.returncode: int | None = None
        self.stdin: Any = None
        self.stderr: Any = None
        self._lock = Lock()
        reader, writer = os.pipe() if has_pipe else (os.open(os.devnull, os.O_RDONLY), -1)
        try:
            given = {0: reader, **descriptors}
            values = dict(os.environ) if environment is None else dict(environment)
            wanted = Wanted(module, list(arguments), values, os.getcwd(), list(given), os.getpid())
            self._connection = _connected(template)
            socket.send_fds(self._connection, [pickle.dumps(wanted)], list(given.values()))
        finally:
            os.close(reader)
        if has_pipe:
            self.stdin = os.fdopen(writer, "wb", buffering=0)
        self.pid: int = pickle.loads(self._connection.recv(MAX_MESSAGE))

    def poll(self) -> int | None:
        """Return the exit code; None: it runs."""
        return self._receive(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs for longer.
        """
        code = self._receive(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _receive(self, timeout_s: float | None) -> int | None:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while True:
            left_s = LOOK_S if deadline is None else max(min(LOOK_S, deadline - monotonic()), 0.0)
            with self._lock:  # another thread may wait, too
                if self.returncode is None and select.select([self._connection], [], [], left_s)[0]:
                    code: int = pickle.loads(self._connection.recv(MAX_MESSAGE))
                    self._connection.shutdown(socket.SHUT_WR)
                    self._connection.recv(1)  # nothing, once no zombie is left
                    self._connection.close()
                    self.returncode = code
            if self.returncode is not None or left_s == 0.0:
                return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def fork_workers(template: str) -> Any:
    """Return what stands for ``subprocess`` where worker processes are started: a template forks them."""

    def fork(command: list[str], *, pass_fds: tuple[int, ...], stdin: int, stderr: int) -> ForkedProcess:
        assert command[:4] == [sys.executable, "-X", "faulthandler", "-m"]
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.PIPE)
        reader, writer = os.pipe()
        try:
            descriptors = {1: 1, 2: writer, **{fd: fd for fd in pass_fds}}
            process = ForkedProcess(template, command[4], command[5:], descriptors)
        finally:
            os.close(writer)
        process.stderr = os.fdopen(reader, "rb", buffering=0)
        return process

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    return SimpleNamespace(Popen=fork, **names)


def run_forked(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module in a process that has an engine's imports; return what it printed, as ``subprocess.run`` does."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        descriptors = {1: output.fileno(), 2: errors.fileno()}
        process = ForkedProcess(templates().engines, module, arguments, descriptors, environment=environment)
        try:
            code = process.wait(START_TIMEOUT_S)
        finally:
            process.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read().decode(), errors.read().decode())


def asked_for(template: str, asker: int) -> list[int]:
    """Return the ids of running processes that a process asked a template for, in the order of their starts."""
    with _connected(template) as connection:
        connection.send(pickle.dumps(Question(asker)))
        found: list[int] = pickle.loads(connection.recv(MAX_MESSAGE))
        return found


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


class Templates(NamedTuple):
    """Addresses of the templates."""

    front_ends: str
    engines: str


@cache
def templates() -> Templates:
    """Start both templates, which end with this process."""
    folder = tempfile.TemporaryDirectory(prefix="templates-")
    front_ends, engines = f"{folder.name}/front-ends", f"{folder.name}/engines"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = [[engines], [front_ends, engines]]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.cpu.server.template", *addresses],
            stdin=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        for addresses in commands
    ]

    def end() -> None:
        for process in started:
            process.communicate()
        folder.cleanup()

    atexit.register(end)
    deadline = monotonic() + START_TIMEOUT_S
    for process, addresses in zip(started, commands, strict=True):
        while not Path(addresses[0]).exists():
            assert process.poll() is None, "a template has ended"
            assert monotonic() < deadline, "a template has not started"
            sleep(0.02)
    return Templates(front_ends, engines)
