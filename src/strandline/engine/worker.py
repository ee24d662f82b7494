"""The process that runs steps for an ``MpExecutor``: ``python -m strandline.engine.worker FILE_DESCRIPTOR``.

It knows of requests what the plans say, and nothing else. It ends when the connection closes. Signals are left to the
process that started it, so that Ctrl-C in a terminal does not end what a drain still needs.
"""

import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, BinaryIO

import strandline.errors
from strandline.device.executor import Executor
from strandline.engine.loading import load_uni_executor
from strandline.engine.mp_executor import Call, Reply, Start
from strandline.errors import EngineError
from strandline.gc_policy import freeze_gc
from strandline.text.compiling_threads import CompilingThreads


class Worker:
    """Obeys calls. Steps are launched in order; results and grammars have threads of their own, and hold up no call."""

    def __init__(self, executor: Executor, send: Callable[[Reply], None]) -> None:
        self._executor = executor
        self._send = send
        self._results = ThreadPoolExecutor(1, "results")
        self._compiling = CompilingThreads()
        self._grammars: dict[int, object] = {}
        """Compiled grammars by the number of the call; they are kept until the caller releases them."""

    def handle(self, call: Call) -> None:
        """Run a call, or start it in the background."""
        for number in call.released:
            self._grammars.pop(number, None)
        if call.method == "compile_grammar":
            self._compiling.submit(self._reply, call, lambda: self._compile(call))
        elif call.method == "launch":
            self._launch(call)
        else:
            self._reply(call, lambda: getattr(self._executor, call.method)(*call.arguments))

    def close(self) -> None:
        """End the threads, and release the device."""
        self._compiling.close()
        self._results.shutdown()
        self._executor.close()

    def _compile(self, call: Call) -> None:
        self._grammars[call.number] = self._executor.compile_grammar(*call.arguments)

    def _launch(self, call: Call) -> None:
        try:
            launched = self._executor.launch(*call.arguments)
        except Exception as error:  # noqa: BLE001 - the process's edge: the caller raises it
            self._send(Reply(call.number, None, portable(error)))
        else:
            self._results.submit(self._reply, call, launched.result)

    def _reply(self, call: Call, function: Callable[[], Any]) -> None:
        try:
            reply = Reply(call.number, function())
        except Exception as error:  # noqa: BLE001 - the process's edge: the caller raises it
            reply = Reply(call.number, None, portable(error))
        self._send(reply)


def portable(error: Exception) -> Exception:
    """Return an error that another process can raise: our own types stay, the others become an ``EngineError``."""
    is_ours = getattr(strandline.errors, type(error).__name__, None) is type(error)
    sent = error if is_ours else EngineError(f"{type(error).__name__}: {error}")
    sent.add_note("In the worker process:\n" + "".join(traceback.format_exception(error)).rstrip())
    return sent


def serve(calls: BinaryIO, connection: socket.socket) -> int:
    """Load what the first message names, and handle calls until there are no more; return the exit code."""
    lock = Lock()

    def send(reply: Reply) -> None:
        data = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        with lock:
            connection.sendall(data)

    start: Start = pickle.load(calls)
    try:
        executor = load_uni_executor(start.config, progress=start.progress)
    except Exception as error:  # noqa: BLE001 - the process's edge: the caller raises it
        send(Reply(start.number, None, portable(error)))
        return 2
    freeze_gc()
    send(Reply(start.number, executor.facts))
    worker = Worker(executor, send)
    try:
        while True:
            worker.handle(pickle.load(calls))
    finally:
        worker.close()


def main() -> int:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as calls:
            return serve(calls, connection)
    except (EOFError, ConnectionError, pickle.UnpicklingError):
        return 0  # the other end is closed


if __name__ == "__main__":
    sys.exit(main())
