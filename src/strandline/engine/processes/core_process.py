"""The engine process: ``python -m strandline.engine.processes.core_process ADDRESS HEARTBEAT``.

The HTTP process starts it. ``HEARTBEAT`` is the number of an inherited file descriptor.

It exits when its standard input closes, which happens when the HTTP process exits for any reason. It ignores signals,
so that Ctrl-C in a terminal does not end what the HTTP process needs to finish its requests.
"""

import logging
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
from typing import Any, Final

import zmq

from strandline.device.hardware.visible_gpus import take_gpus
from strandline.engine.core import EngineCore
from strandline.engine.loading import load_core
from strandline.engine.processes.engine_log import name_engine_in_log
from strandline.errors import ConfigError, RequestError
from strandline.events.wire import encode_batch
from strandline.gc_policy import freeze_gc
from strandline.ids import NO_TOKEN
from strandline.records.adapters import LoadedAdapter
from strandline.records.control import Action
from strandline.records.events import CoreStats, FinishReason, StepEvents, Submission, TokenEvent
from strandline.records.heartbeat import BEAT_INTERVAL_S, Heartbeat
from strandline.records.messages import (
    ENCODER,
    TO_CORE,
    AdapterLoaded,
    AskCache,
    AskPictures,
    AskStats,
    AskWhy,
    CacheChanged,
    CacheShown,
    Control,
    Controlled,
    Died,
    Explained,
    Finish,
    Flush,
    Flushed,
    FromCore,
    LoadAdapter,
    Ready,
    Refused,
    SendPictures,
    Start,
    Stats,
    Stepped,
    Submit,
    ToCore,
    UnloadAdapter,
)
from strandline.signals import ignore_signals
from strandline.text.pending_grammars import PendingGrammars

Socket = zmq.Socket[bytes]
LOGGER: Final = logging.getLogger(__name__)
IPC: Final = "ipc://"
EXIT_INTERVAL_S = 0.5
"""How long loading may go on after an exit was raised in it, before it is raised again."""
LINGER_MS = 2000
STALLED_MS: Final = 10
"""Longest wait for pictures before other work is looked for."""
TRIM_AFTER_S = 5.0
"""Idle time after which the engine returns free scratch memory to the system."""


class CoreLoop:
    """Runs steps while there is work, and handles messages before every step, so that an abort waits for one at most.

    Sequences with a grammar are queued once it is compiled, so that no step waits for that.
    """

    def __init__(self, core: EngineCore, socket: Socket, lifeline: int, heartbeat: Heartbeat) -> None:
        """
        Args:
            lifeline: a file descriptor; when it closes, the loop ends.
        """
        self._core = core
        core.scheduler.pictures.ask = lambda digests: self._send(AskPictures(digests))
        self._pending_grammars = PendingGrammars(core.executor.compile_grammar)
        core.adapters.count(lambda: self._pending_grammars)
        self._socket = socket
        self._lifeline = lifeline
        self._heartbeat = heartbeat
        self._poller = zmq.Poller()
        for source in (socket, lifeline, self._pending_grammars.fileno()):
            self._poller.register(source, zmq.POLLIN)
        feed, publisher = core.event_feed, None if core.event_feed is None else core.event_feed.publisher
        self._feed, self._events_fd = feed, None if publisher is None else publisher.fileno()
        self._exchange_fds = {each.fileno() for each in (core.hand_over, core.discoveries) if each is not None}
        for fd in self._exchange_fds:
            self._poller.register(fd, zmq.POLLIN)
        if self._events_fd is not None:
            self._poller.register(self._events_fd, zmq.POLLIN)
        self._worker_fds = set(core.executor.worker_fds)
        for fd in self._worker_fds:
            self._poller.register(fd, zmq.POLLIN)
        self._is_stopped = False
        self._trim_at_s: float | None = None
        """When to return memory, by ``time.monotonic``; None once that is done."""

    def run(self) -> None:
        """Serve until the lifeline closes."""
        try:
            if self._feed is not None:
                self._feed.flush()  # what the disk cache holds
            while not self._is_stopped:
                self._send_cache_events()
                self._receive_messages()
                if self._core.has_unfinished and not self._is_stopped:
                    events = self._core.step()
                    self._send_cache_events()  # first: the next turn may come as soon as an answer has ended
                    self._send(Stepped(events))
                    self._trim_at_s = time.monotonic() + TRIM_AFTER_S
        finally:
            self._pending_grammars.close()

    def _receive_messages(self) -> None:
        """Handle the messages that have arrived; wait for one if there is no work."""
        self._heartbeat.end_turn()
        ready = dict(self._poller.poll(self._poll_timeout_ms()))
        self._heartbeat.begin_turn()
        if not ready and not self._core.has_unfinished:
            self._trim_at_s = None
            self._core.executor.release_free_memory()
        if self._lifeline in ready:
            self._is_stopped = True
        elif not self._worker_fds.isdisjoint(ready):
            self._core.executor.check_workers()
        if not self._exchange_fds.isdisjoint(ready):
            self._core.exchange()
        if self._events_fd in ready and self._feed is not None:
            self._feed.flush()
        if self._pending_grammars.fileno() in ready:
            for submission, grammar in self._pending_grammars.take():
                if isinstance(grammar, RequestError):
                    self._send(Stepped(_failure(submission, grammar)))
                else:
                    self._add(submission, grammar)
        while self._socket in ready and not self._is_stopped:
            try:
                self._handle(TO_CORE.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return

    def _poll_timeout_ms(self) -> int | None:
        """Return how long to wait for a message: not at all while there is work, a moment while sequences wait for
        pictures, else until memory is returned.
        """
        if self._core.has_unfinished:
            return STALLED_MS if self._core.is_stalled else 0
        if self._trim_at_s is None:
            return None
        return max(int((self._trim_at_s - time.monotonic()) * 1000) + 1, 0)

    def _handle(self, message: ToCore) -> None:
        match message:
            case Submit():
                for submission in message.complete():
                    if submission.new.params.structured_outputs is None:
                        self._add(submission)
                    else:
                        self._pending_grammars.put(submission)
            case SendPictures(pictures):
                self._core.scheduler.pictures.receive(pictures)
            case Finish(request_ids):
                for request_id in request_ids:
                    self._pending_grammars.discard(request_id)
                    self._core.finish(request_id)
            case AskStats():
                self._core.exchange()  # an idle engine ends leases now
                self._send(Stats(self._stats()))
            case AskCache(number, salt):
                self._send(CacheShown(number, self._core.watch.state(salt, self._stats())))
            case AskWhy(number, question):
                self._send(Explained(number, self._core.watch.answer(question)))
            case LoadAdapter(number, name, path):
                self._send(AdapterLoaded(number, self._load_adapter(name, path)))
            case UnloadAdapter(digest):
                self._core.adapters.unload(digest)
            case Control(number, action):
                self._send(Controlled(number, self._control(action)))
            case Flush(number):
                self._send(Flushed(number, self._core.flush(self._has_lost_lifeline)))

    def _add(self, submission: Submission, grammar: object = None) -> None:
        try:
            self._core.add(submission, grammar)
        except RequestError as error:
            # Its adapter has been unloaded since it was checked, or could not be loaded again after a restart.
            self._send(Stepped(_failure(submission, error)))

    def _load_adapter(self, name: str, path: str) -> LoadedAdapter | str:
        try:
            return self._core.adapters.load(name, path)
        except (ConfigError, RequestError) as error:
            return str(error)

    def _control(self, action: Action) -> bool | str:
        try:
            is_done = self._core.control.apply(action)
        except ConfigError as error:
            return str(error)
        self._send_cache_events()
        self._send(Stepped(self._core.take_late_events()))
        return is_done

    def _send_cache_events(self) -> None:
        if self._feed is not None and (events := self._feed.take()):
            self._send(CacheChanged(encode_batch(time.time(), events)))

    def _has_lost_lifeline(self) -> bool:
        return bool(select([self._lifeline], (), (), 0)[0])

    def _stats(self) -> CoreStats:
        stats = self._core.stats()
        return replace(stats, num_waiting=stats.num_waiting + len(self._pending_grammars))

    def _send(self, message: FromCore) -> None:
        self._socket.send(ENCODER.encode(message))


def _failure(submission: Submission, error: RequestError) -> StepEvents:
    """Return the end of a sequence that cannot be run here, though it was checked."""
    name = submission.new.request_id
    LOGGER.warning("%s cannot be run: %s", name, error)
    return StepEvents(tokens=[TokenEvent(name, NO_TOKEN, None, FinishReason.ERROR, None, None)])


def serve_core(socket: Socket, lifeline: int, heartbeat: Heartbeat) -> int:
    """Load the model that the first message names and serve it; return the exit code."""
    poller = zmq.Poller()
    for source in (socket, lifeline):
        poller.register(source, zmq.POLLIN)
    is_abandoned = lifeline in dict(poller.poll())
    _remove_socket_file(socket)
    if is_abandoned:
        return 0
    start = TO_CORE.decode(socket.recv())
    if not isinstance(start, Start):
        return 2
    name_engine_in_log(start.config)
    try:
        take_gpus(start.config)
        with interrupted_by(lifeline):
            core = load_core(start.config)
    except ConfigError as error:
        socket.send(ENCODER.encode(Refused(str(error))))
        return 2
    freeze_gc()
    # Audits compute prompts again from their first token, after they have ended.
    limits = replace(core.limits, asks_for_pictures=not start.config.audit_rate)
    socket.send(ENCODER.encode(Ready(limits, core.describe(), core.event_endpoints)))
    try:
        CoreLoop(core, socket, lifeline, heartbeat).run()
    except Exception as error:
        # The edge of the process. After an internal error the state may be wrong, so nothing more is served.
        socket.send(ENCODER.encode(Died(f"{type(error).__name__}: {error}")))
        raise
    finally:
        core.close()
    return 0


def _remove_socket_file(socket: Socket) -> None:
    """Remove a connected socket's file and its directory, which the process that made them may not live to do."""
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    file = Path(address.removeprefix(IPC))
    if address.startswith(IPC):
        with suppress(OSError):
            file.unlink()
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
    address, heartbeat_fd = sys.argv[1:]
    heartbeat = Heartbeat(int(heartbeat_fd))
    Thread(target=beat_forever, args=[heartbeat], daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.connect(address)
        return serve_core(socket, sys.stdin.fileno(), heartbeat)


if __name__ == "__main__":
    sys.exit(main())
