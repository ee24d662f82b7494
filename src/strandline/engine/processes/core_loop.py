"""The loop of an engine's process: messages from the socket, and steps."""

import logging
import time
from dataclasses import replace
from select import select
from typing import Final

import zmq

from strandline.engine.core import EngineCore
from strandline.errors import ConfigError, OutOfMemoryError, RequestError
from strandline.events.wire import encode_batch
from strandline.ids import NO_TOKEN
from strandline.records.adapters import LoadedAdapter
from strandline.records.control import Action
from strandline.records.events import CoreStats, FinishReason, StepEvents, Submission, TokenEvent
from strandline.records.heartbeat import Heartbeat
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
    Explained,
    Finish,
    Flush,
    Flushed,
    FromCore,
    LacksMemory,
    LoadAdapter,
    SendPictures,
    Stats,
    Stepped,
    Submit,
    ToCore,
    UnloadAdapter,
)
from strandline.text.pending_grammars import PendingGrammars

Socket = zmq.Socket[bytes]
LOGGER: Final = logging.getLogger(__name__)
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

    def _control(self, action: Action) -> bool | str | LacksMemory:
        try:
            return self._core.control.apply(action)
        except ConfigError as error:
            return str(error)
        except OutOfMemoryError as error:
            LOGGER.warning("%s", error)
            return LacksMemory(str(error))
        finally:
            self._send_cache_events()
            self._send(Stepped(self._core.take_late_events()))

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
