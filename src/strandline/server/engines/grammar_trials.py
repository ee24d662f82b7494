"""Trial compilation of grammars in processes that can be killed, before the engine compiles them.

A few hundred bytes can keep llguidance busy for minutes, fill the memory or overflow the stack, and a thread that
compiles them cannot be stopped. A grammar is therefore first compiled in a separate process. The system ends that
process when it exceeds its time or memory, and it exits when the request has ended. The engine needs about the same
time and memory as the trial.

The processes are forked from a *template*: a process that was forked when the server had one thread, and that holds the
prepared vocabulary. Its only work is to fork.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import struct
from collections import OrderedDict
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Final, Never, Self

from strandline.errors import EngineError, RequestError
from strandline.records.sampling_params import StructuredOutputsParams
from strandline.server.engines.engine_link import RequestTimeoutError
from strandline.text import compiling_threads
from strandline.text.structured import Grammars, compile_source, refusal

LOGGER: Final = logging.getLogger("strandline.server")

MAX_CPU_S: Final = 3
MAX_BYTES: Final = 256 * 2**20
"""Maximum address space of a trial. A compiled grammar takes at most a few tens of MiB."""
STACK_BYTES: Final = compiling_threads.STACK_BYTES // 2
"""Stack of a trial, as large as the engine's: a grammar that passes does not overflow it there either."""
NUM_TRIALS: Final = 4
"""Maximum number of concurrent trials, so that a slow one does not delay all others."""
TOO_MUCH: Final = (
    f"it takes more than {MAX_CPU_S} s of processor time or {MAX_BYTES >> 20} MiB to compile, or its rules are nested "
    "too deeply"
)
MAX_REMEMBERED: Final = 1024
NICENESS: Final = 5
"""Low priority, so that trials slow the engine and the server as little as possible."""
HEADER: Final = struct.Struct("!Q")
"""The length of a grammar in bytes, sent before it."""
PASSED: Final = b"+"
REFUSED: Final = b"-"
"""First bytes of an answer; warnings follow ``PASSED``, a reason ``REFUSED``. A killed trial sends no answer."""


class GrammarTrials:
    """Runs trial compilations. Leave its context to close it."""

    def __init__(self, grammars: Grammars, timeout_s: float | None) -> None:
        """Fork the template, which must happen while this process has one thread.

        Args:
            timeout_s: time limit of a request.
        """
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._passed: OrderedDict[int, None] = OrderedDict()
        """Hashes of the grammars that passed most recently."""
        self._slots = asyncio.Semaphore(NUM_TRIALS)
        self._control, theirs = socket.socketpair()
        self._template = os.fork()
        if self._template == 0:
            self._control.close()
            _run_template(theirs, grammars)
        theirs.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        os.kill(self._template, signal.SIGKILL)
        os.waitpid(self._template, 0)

    async def check(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar on trial, unless it has passed before. If this is cancelled, the trial ends.

        Raises:
            RequestError: it is invalid or exceeds a limit; the message has the reason.
            RequestTimeoutError: it was not compiled in time.
            EngineError: trials are no longer possible.
        """
        source = await asyncio.to_thread(self._grammars.source_text, params)
        key = hash(source)
        if key not in self._passed:
            try:
                async with asyncio.timeout(self._timeout_s), self._slots:
                    answer = await self._ask(source)
            except TimeoutError as error:
                raise RequestTimeoutError(
                    f"the grammar was not compiled within {self._timeout_s:g} s; simplify it, try again later, or "
                    "raise --request-timeout-s"
                ) from error
            if not answer.startswith(PASSED):
                raise refusal(params, answer.removeprefix(REFUSED).decode() or TOO_MUCH)
            if warnings := answer.removeprefix(PASSED).decode():
                LOGGER.info("%s: not enforced by the grammar: %s", params.name_of(params.kind), warnings)
        self._passed[key] = None
        self._passed.move_to_end(key)
        if len(self._passed) > MAX_REMEMBERED:
            self._passed.popitem(last=False)

    async def _ask(self, source: str) -> bytes:
        """Return a trial's answer; empty if it was killed."""
        loop = asyncio.get_running_loop()
        data = source.encode()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                except OSError as error:
                    raise EngineError("the process that tries grammars has ended; restart the server") from error
            ours.setblocking(False)
            answer = b""
            try:
                await loop.sock_sendall(ours, HEADER.pack(len(data)) + data)
                while part := await loop.sock_recv(ours, 4096):
                    answer += part
            except ConnectionError:
                return b""
            return answer


def _run_template(control: socket.socket, grammars: Grammars) -> Never:
    """Fork a trial for each connection that arrives, until the server closes its end."""
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    with suppress(RequestError):  # every trial gives the reason
        grammars.load()
    gc.freeze()
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            os._exit(1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            _run_trial(socket.socket(fileno=fds[0]), grammars)
        os.close(fds[0])


def _run_trial(connection: socket.socket, grammars: Grammars) -> Never:
    """Receive a grammar and report whether it can be compiled."""
    file = connection.makefile("rb")
    (size,) = HEADER.unpack(file.read(HEADER.size))
    source = file.read(size).decode()
    Thread(target=_exit_with, args=(connection,), daemon=True).start()
    _set_limits()
    try:
        start = compile_source(source, grammars.load())
        answer = PASSED + "; ".join(dict.fromkeys(start.get_grammar_warnings())).encode()
    except RequestError as error:
        answer = REFUSED + str(error).encode()
    connection.sendall(answer)
    os._exit(0)


def _exit_with(connection: socket.socket) -> None:
    """End the process when the server closes the connection: the request has ended."""
    connection.recv(1)
    os._exit(0)


def _set_limits() -> None:
    with open("/proc/self/statm") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MAX_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S,) * 2)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
