"""The connection to a worker process (``engine/processes/worker.py``): calls out, replies back, pickled.

Calls are numbered by the sender (``engine/workers/workers.py``). Those that change the device are executed in order;
a reply may come before an earlier one's. The worker ends when the connection closes: when it is closed here, or this
process has ended.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Lock, Thread
from typing import Any, Final, NamedTuple

from strandline.config import EngineConfig
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.errors import EngineError
from strandline.signals import signals_held

WORKER_MODULE: Final = "strandline.engine.processes.worker"
EXIT_TIMEOUT_S: Final = 30.0
"""How long a worker may take to end before it is killed."""
LAST_BYTES: Final = 4096
"""What is kept of a worker's last words."""


class WorkerEndedError(EngineError):
    """A worker has ended without a reply to a call."""


class Start(NamedTuple):
    """The first message to the worker: what to load."""

    number: int
    config: EngineConfig
    progress: bool
    rendezvous: Rendezvous | None
    """None: the worker is the only rank."""
    weights: str = ""
    """A digest of all weights, where files of a tier need it: a rank reads only its part of them."""


class Call(NamedTuple):
    """Call a method of the worker's executor."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    released: tuple[int, ...]
    """Calls whose results the worker need not keep any longer."""


class Reply(NamedTuple):
    """What a call returned or raised. A worker that cannot start replies to ``Start`` with the error, and ends."""

    number: int
    value: Any
    error: Exception | None = None


class WorkerLink:
    """A worker process and the connection to it. Any thread may call."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with ExitStack() as failed:
            failed.callback(self._socket.close)
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-X", "faulthandler", "-m", WORKER_MODULE, str(number)]
                with signals_held():
                    self.process = subprocess.Popen(
                        command, pass_fds=(number,), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
                    )
                    failed.callback(self._kill)  # signals that were held arrive as these are released
            self.process_fd = os.pidfd_open(self.process.pid)
            failed.pop_all()
        """Becomes readable when the process has ended; open until ``close``."""
        self.last_words = b""
        """The end of what the worker has written to its standard error."""
        self._replies = self._socket.makefile("rb")
        self._sending = Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._has_ended = False
        self._threads = [
            Thread(target=self._receive, name="replies of the worker", daemon=True),
            Thread(target=self._repeat_words, name="words of the worker", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, number: int, message: bytes) -> Future[Any]:
        """Send a pickled ``Start`` or ``Call`` of this number; return what the worker will return or raise."""
        future = Future[Any]()
        with self._sending:
            self._waiting[number] = future
            try:
                if self._has_ended:
                    raise BrokenPipeError
                self._socket.sendall(message)
            except OSError:
                self._fail(number)
        return future

    def hang_up(self) -> None:
        """Close the connection, which ends the worker in order. A second call does nothing."""
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._threads[0].join()
            self._replies.close()
            self._socket.close()

    def close(self) -> None:
        """End the worker, and wait for its end. A second call does nothing."""
        self.hang_up()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._threads[1].join()
        if self.process_fd >= 0:
            os.close(self.process_fd)
            self.process_fd = -1

    def describe_end(self) -> str | None:
        """Return how the worker has ended; None: it has not."""
        code = self.process.poll()
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def ended_error(self) -> WorkerEndedError:
        """Return the error of calls that a worker which has ended can no longer answer."""
        return WorkerEndedError(f"the worker process {self.process.pid} has ended; its own log says why")

    def _kill(self) -> None:
        """Kill a worker that has no threads here yet."""
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _receive(self) -> None:
        try:
            while True:
                reply: Reply = pickle.load(self._replies)
                future = self._waiting.pop(reply.number)
                if reply.error is None:
                    future.set_result(reply.value)
                else:
                    future.set_exception(reply.error)
        except (EOFError, OSError, pickle.UnpicklingError):
            with self._sending:
                self._has_ended = True
            for number in list(self._waiting):
                self._fail(number)

    def _repeat_words(self) -> None:
        """Pass on what the worker writes to its standard error."""
        assert self.process.stderr is not None
        with self.process.stderr as words:
            while chunk := os.read(words.fileno(), LAST_BYTES):
                self.last_words = (self.last_words + chunk)[-LAST_BYTES:]
                os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, chunk)

    def _fail(self, number: int) -> None:
        """Let a call raise that the worker has ended, unless another thread has done so."""
        future = self._waiting.pop(number, None)
        if future is not None:
            future.set_exception(self.ended_error())
