"""The executor whose steps run in a worker process (``engine/worker.py``): plans out, results back, pickled.

Calls are numbered. Those that change the device are executed in order; a reply may come before an earlier one's. The
worker ends when the connection closes: when the executor is closed or garbage, or its process has ended.
"""

import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from threading import Lock, Thread
from typing import Any, Final, NamedTuple
from weakref import finalize

from strandline.cache import Action, Completion
from strandline.config import EngineConfig
from strandline.device.executor import ExecutorFacts, LaunchedStep
from strandline.errors import EngineError
from strandline.records.plan import StepPlan, StepResult
from strandline.records.sampling_params import StructuredOutputsParams

WORKER_MODULE: Final = "strandline.engine.worker"
EXIT_TIMEOUT_S: Final = 30.0
"""How long a worker may take to end before it is killed."""


class Start(NamedTuple):
    """The first message to the worker: what to load."""

    number: int
    config: EngineConfig
    progress: bool


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
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", WORKER_MODULE, str(number)]
            self.process = subprocess.Popen(command, pass_fds=(number,), stdin=subprocess.DEVNULL)
        self._replies = self._socket.makefile("rb")
        self._sending = Lock()
        self._numbers = count()
        self._waiting: dict[int, Future[Any]] = {}
        self._released: deque[int] = deque()
        self._has_ended = False
        self._thread = Thread(target=self._receive, name="replies of the worker", daemon=True)
        self._thread.start()

    def start(self, config: EngineConfig, *, progress: bool) -> ExecutorFacts:
        """Have the worker load the model, and wait for that. Raises what loading raises."""
        number = next(self._numbers)
        facts: ExecutorFacts = self._send(Start(number, config, progress)).result()
        return facts

    def call(self, method: str, *arguments: Any) -> tuple[int, Future[Any]]:
        """Call a method of the worker's executor; return the call's number and what it will return or raise."""
        number = next(self._numbers)
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        return number, self._send(Call(number, method, arguments, released))

    def release(self, number: int) -> None:
        """Let the worker drop a call's result, with the next call: a finalizer must not wait for a lock."""
        self._released.append(number)

    def close(self) -> None:
        """End the worker, and wait for its end. A second call does nothing."""
        if self._socket.fileno() < 0:
            return
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._replies.close()
        self._socket.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, message: Start | Call) -> Future[Any]:
        # Pickled before anything is sent: an error leaves the connection as it was.
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        future = Future[Any]()
        with self._sending:
            if self._has_ended:
                raise self._ended()
            self._waiting[message.number] = future
            try:
                self._socket.sendall(data)
            except OSError as error:
                raise self._ended() from error
        return future

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
                self._waiting.pop(number).set_exception(self._ended())

    def _ended(self) -> EngineError:
        return EngineError(f"the worker process {self.process.pid} has ended; its own log says why")


class RemoteStep:
    """A step in flight in the worker."""

    is_launch_bound = False

    def __init__(self, result: "Future[StepResult]") -> None:
        self._result = result

    def result(self) -> StepResult:
        """Wait for the worker, and return what the step produced."""
        return self._result.result()


class CompiledElsewhere:
    """Holds a grammar that the worker has compiled."""


class MpExecutor:
    """Runs steps in a worker process.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self._link = WorkerLink()
        self._finalizer = finalize(self, self._link.close)
        try:
            self.facts = self._link.start(config, progress=progress)
        except BaseException:
            self._link.close()
            raise

    @property
    def process_id(self) -> int:
        """The worker's process id."""
        return self._link.process.pid

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Send a plan to the worker."""
        return RemoteStep(self._link.call("launch", plan)[1])

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Apply the cache's actions, in order, outside a step."""
        if actions:
            self._call("carry_out", tuple(actions))

    def wait_for_transfers(self, timeout_s: float) -> tuple[Completion, ...]:
        """Return the transfers that have ended and that no result has reported; wait until there is one, or so long."""
        _, future = self._link.call("wait_for_transfers", timeout_s)
        ended: tuple[Completion, ...] = future.result()
        return ended

    def compile_grammar(self, params: StructuredOutputsParams) -> object:
        """Have the worker compile a grammar beside its steps; any thread may call.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        number, future = self._link.call("compile_grammar", params)
        future.result()
        held = CompiledElsewhere()
        finalize(held, self._link.release, number).atexit = False
        return held

    def forget_requests(self) -> None:
        """Drop what is known of requests, and the scratch memory of their steps."""
        self._call("forget_requests")

    def capture_graphs(self) -> None:
        """Capture CUDA graphs in the worker."""
        self._call("capture_graphs")

    def release_free_memory(self) -> None:
        """Return the worker's free memory to the system."""
        self._call("release_free_memory")

    def close(self) -> None:
        """End the worker, and wait for its end."""
        self._finalizer()

    def _call(self, method: str, *arguments: Any) -> None:
        self._link.call(method, *arguments)[1].result()
