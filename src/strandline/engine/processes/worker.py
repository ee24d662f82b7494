"""A process that runs steps for an ``MpExecutor``: ``python -m strandline.engine.processes.worker FILE_DESCRIPTOR``.

It knows of requests what the plans say, and nothing else. It ends when the connection closes. Signals are left to the
process that started it, so that Ctrl-C in a terminal does not end what a drain still needs; SIGUSR1 writes the main
thread's stack to standard error.
"""

import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Event, Lock, Thread
from typing import Any, BinaryIO, Final

import strandline.errors
from strandline.config import EngineConfig
from strandline.device.executor import Executor, LaunchedStep
from strandline.device.hardware.visible_gpus import take_gpus
from strandline.device.ranks.process_ranks import ProcessRanks
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.engine.loading import load_uni_executor, resolve_device
from strandline.engine.processes.engine_log import name_engine_in_log
from strandline.engine.workers.packed_plan import PackedPlan, PlanUnpacker
from strandline.engine.workers.worker_link import Call, Reply, Start
from strandline.errors import EngineError
from strandline.gc_policy import freeze_gc
from strandline.kernels.ranks import ONE_RANK
from strandline.records.plan import StepResult
from strandline.signals import ignore_signals
from strandline.text.compiling_threads import CompilingThreads

COPIES: Final = ("begin_read", "begin_write")
"""Calls that return copies, which have threads of their own."""

MAX_COPIES: Final = 4
"""Copies at once; they wait for the device, or for memory."""

LEAVE_S: Final = 10.0
"""How long a worker may still compute after the connection has closed: a rank may wait for one that has ended. A worker
that is loading ends at once."""


class Worker:
    """Obeys calls. Steps are launched in order; results, copies and grammars have threads of their own.

    Args:
        rank: results of the first rank are complete, those of others say what must agree and what has been transferred.
        enter_thread: prepares the threads of results and copies.
    """

    def __init__(
        self,
        executor: Executor,
        send: Callable[[Reply], None],
        rank: int = 0,
        enter_thread: Callable[[], object] | None = None,
    ) -> None:
        self._executor = executor
        self._rank = rank
        self._send = send
        self._results = ThreadPoolExecutor(1, "results", enter_thread)
        self._copying = ThreadPoolExecutor(MAX_COPIES, "copies", enter_thread)
        self._compiling = CompilingThreads()
        self._unpacker = PlanUnpacker()
        self._grammars: dict[int, object] = {}
        """Compiled grammars by the number of the call; they are kept until the caller releases them."""

    def handle(self, call: Call) -> None:
        """Run a call, or start it in the background."""
        for number in call.released:
            self._grammars.pop(number, None)
        if call.method == "compile_grammar":
            self._compiling.submit(self._reply, call, lambda: self._compile(call))
        elif call.method == "launch":
            self._begin(call, self._launch, self._results, self._result)
        elif call.method in COPIES:
            self._begin(call, getattr(self._executor, call.method), self._copying, lambda copy: copy())
        else:
            if call.method == "forget_requests":
                self._unpacker.forget_requests()
            self._reply(call, lambda: getattr(self._executor, call.method)(*call.arguments))

    def close(self) -> None:
        """End the threads, and release the device."""
        self._compiling.close()
        self._results.shutdown()
        self._copying.shutdown()
        self._executor.close()

    def _compile(self, call: Call) -> None:
        self._grammars[call.number] = self._executor.compile_grammar(*call.arguments)

    def _begin(
        self, call: Call, begin: Callable[..., Any], threads: ThreadPoolExecutor, finish: Callable[[Any], Any]
    ) -> None:
        """Begin in order what a thread then finishes."""
        try:
            begun = begin(*call.arguments)
        except Exception as error:  # noqa: BLE001 - the process's edge: the caller raises it
            self._send(Reply(call.number, None, portable(error)))
        else:
            threads.submit(self._reply, call, lambda: finish(begun))

    def _launch(self, packed: PackedPlan) -> LaunchedStep:
        return self._executor.launch(self._unpacker.unpack(packed))

    def _result(self, launched: LaunchedStep) -> StepResult:
        result = launched.result()
        if self._rank == 0:
            return result
        return StepResult(result.token_ids, drafts=result.drafts, completions=result.completions)

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
    rank = 0 if start.rendezvous is None else start.rendezvous.rank
    is_loaded = Event()
    Thread(target=leave_with, args=[connection, start.rendezvous, is_loaded], daemon=True).start()
    name_engine_in_log(start.config)
    try:
        take_gpus(start.config)
        ranks = None if start.rendezvous is None else new_ranks(start.rendezvous, start.config)
        executor = load_uni_executor(
            start.config, ranks=ranks or ONE_RANK, weights=start.weights, progress=start.progress
        )
    except Exception as error:  # noqa: BLE001 - the process's edge: the caller raises it
        send(Reply(start.number, None, portable(error)))
        return 2
    freeze_gc()
    is_loaded.set()
    send(Reply(start.number, executor.facts))
    with ExitStack() as stack:
        if ranks is not None:
            stack.callback(ranks.close)
        worker = stack.enter_context(
            closing(Worker(executor, send, rank, None if ranks is None else ranks.enter_thread))
        )
        while True:
            worker.handle(pickle.load(calls))


def new_ranks(rendezvous: Rendezvous, config: EngineConfig) -> ProcessRanks:
    """Return the ranks of an engine, to be connected."""
    return ProcessRanks(rendezvous, resolve_device(config, rendezvous.rank), is_deterministic=config.deterministic)


def leave_with(connection: socket.socket, rendezvous: Rendezvous | None, is_loaded: Event) -> None:
    """End the process when the connection has closed, whatever it is waiting for; if it is loaded, some time later."""
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    poller.poll()
    if is_loaded.is_set():
        time.sleep(LEAVE_S)
    if rendezvous is not None:
        rendezvous.remove()
    os._exit(1)


def main() -> int:
    """Run the process."""
    ignore_signals()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    try:
        with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rb") as calls:
            return serve(calls, connection)
    except (EOFError, ConnectionError, pickle.UnpicklingError):
        return 0  # the other end is closed


if __name__ == "__main__":
    sys.exit(main())
