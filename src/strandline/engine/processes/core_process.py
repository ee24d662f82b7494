"""The engine process: ``python -m strandline.engine.processes.core_process ADDRESS HEARTBEAT WORKERS``.

The HTTP process starts it. ``HEARTBEAT`` is the number of an inherited file descriptor, ``WORKERS`` how many processes
its steps will run in, 0 for its own. What it loads comes in the first message, before which it imports what loads it.

It exits when its standard input closes, which happens when the HTTP process exits for any reason. It ignores signals,
so that Ctrl-C in a terminal does not end what the HTTP process needs to finish its requests.

Importing this module loads no tensor library: workers, if the configuration has any, begin before this process loads
one, and all import at the same time.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from select import select
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any, Final

import zmq

from strandline.config import EngineConfig
from strandline.engine.processes.engine_log import name_engine_in_log
from strandline.engine.workers.workers import Workers, spawned_workers
from strandline.errors import ConfigError
from strandline.gc_policy import freeze_gc
from strandline.records.heartbeat import BEAT_INTERVAL_S, Heartbeat
from strandline.records.messages import ENCODER, TO_CORE, Died, Ready, Refused, Start
from strandline.signals import ignore_signals

if TYPE_CHECKING:
    from strandline.engine.core import EngineCore

Socket = zmq.Socket[bytes]
IPC: Final = "ipc://"
EXIT_INTERVAL_S = 0.5
"""How long loading may go on after an exit was raised in it, before it is raised again."""
LINGER_MS = 2000
RECONNECT_MS = 10
"""Interval of attempts to connect: the HTTP process may listen only when it has imported what it needs itself."""


def serve_core(socket: Socket, lifeline: int, heartbeat: Heartbeat, num_workers: int = 0) -> int:
    """Load the model that the first message names and serve it; return the exit code."""
    try:
        with interrupted_by(lifeline), spawned_workers(num_workers) as workers:
            config, core = _load(socket, workers)
    except ConfigError as error:
        socket.send(ENCODER.encode(Refused(str(error))))
        return 2
    except SystemExit:
        _remove_socket_file(socket)  # the HTTP process has ended, perhaps before it sent anything
        raise
    freeze_gc()
    # Audits compute prompts again from their first token, after they have ended.
    limits = replace(core.limits, asks_for_pictures=not config.audit_rate)
    socket.send(ENCODER.encode(Ready(limits, core.describe(), core.event_endpoints)))
    from strandline.engine.processes.core_loop import CoreLoop

    try:
        CoreLoop(core, socket, lifeline, heartbeat).run()
    except Exception as error:
        # The edge of the process. After an internal error the state may be wrong, so nothing more is served.
        socket.send(ENCODER.encode(Died(f"{type(error).__name__}: {error}")))
        raise
    finally:
        core.close()
    return 0


def _load(socket: Socket, workers: Workers | None) -> "tuple[EngineConfig, EngineCore]":
    """Import what loads a model, and load the one that the first message names.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """
    from strandline.device.hardware.visible_gpus import take_gpus
    from strandline.engine import loading

    start = TO_CORE.decode(socket.recv())
    _remove_socket_file(socket)
    assert isinstance(start, Start)
    name_engine_in_log(start.config)
    if workers is None:  # they take theirs
        take_gpus(start.config)
    return start.config, loading.load_core(start.config, workers=workers)


def _remove_socket_file(socket: Socket) -> None:
    """Remove a connected socket's file and its directory, which the process that made them may not live to do."""
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if address.startswith(IPC):
        file = Path(address.removeprefix(IPC))
        with suppress(OSError):
            file.unlink(missing_ok=True)  # there is none before the other process listens
            file.parent.rmdir()


@contextmanager
def interrupted_by(lifeline: int) -> Iterator[None]:
    """Return a context that raises ``SystemExit`` in the main thread when the lifeline closes, so that its workers end.

    What it waits for may take minutes. The exception is raised again until it arrives: callbacks that C code calls,
    such as those of Numba's compiler, cannot raise it. An error that this leads to ends the process in the same way.
    """
    thread_id = main_thread().ident
    assert thread_id is not None
    signal.signal(signal.SIGUSR1, _exit_once)
    report, sys.unraisablehook = sys.unraisablehook, _report_all_but_exits(sys.unraisablehook)
    reader, writer = os.pipe()

    def watch() -> None:
        readable = select((lifeline, reader), (), ())[0]
        while reader not in readable:
            signal.pthread_kill(thread_id, signal.SIGUSR1)
            readable = select((reader,), (), (), EXIT_INTERVAL_S)[0]

    watching = Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    except Exception:
        if lifeline in select((lifeline,), (), (), 0)[0]:
            sys.exit()
        raise
    finally:
        os.close(writer)
        watching.join()
        os.close(reader)
        sys.unraisablehook = report


def _exit_once(*_: object) -> None:
    """Raise ``SystemExit``, unless an earlier one is being handled: what it has interrupted is cleaning up."""
    raised = sys.exception()
    while raised is not None:
        if isinstance(raised, SystemExit):
            return
        raised = raised.__context__
    sys.exit()


def _report_all_but_exits(report: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda error: None if issubclass(error.exc_type, SystemExit) else report(error)


def beat_forever(heartbeat: Heartbeat) -> None:
    """Beat for as long as the process runs."""
    while True:
        heartbeat.beat()
        time.sleep(BEAT_INTERVAL_S)


def main() -> int:
    """Run the process."""
    ignore_signals()
    address, heartbeat_fd, num_workers = sys.argv[1:]
    heartbeat = Heartbeat(int(heartbeat_fd))
    Thread(target=beat_forever, args=[heartbeat], daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(address)
        return serve_core(socket, sys.stdin.fileno(), heartbeat, int(num_workers))


if __name__ == "__main__":
    sys.exit(main())
