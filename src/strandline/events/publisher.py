"""Sends cache events over ZeroMQ, from a separate thread, so that it never blocks a step.

A message on the PUB socket is ``[topic, sequence number, payload]``, the number in eight bytes, big-endian. On the
ROUTER socket, a request ``[empty, first number]`` is answered by messages ``[empty, number, payload]`` for all from the
first number on that are kept, then ``[empty, -1, empty]``. The request -1 is only answered by the last of these, and
asks for everything anew: an ``AllBlocksCleared`` and what is cached now, as the next messages.

Source of the protocol, except for the request -1: vLLM's ``ZmqEventPublisher``.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from threading import Thread
from typing import Final
from weakref import finalize

import zmq

from strandline.errors import ConfigError
from strandline.events.wire import encode_batch
from strandline.kv_events_config import FLAG, KVEventsConfig
from strandline.records.cache_events import BlocksStored, CacheEvent, SnapshotStored
from strandline.records.tokens import TOKEN_BYTES

LOGGER: Final = logging.getLogger("strandline.events")
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
RESTATE: Final = END_OF_REPLAY
"""The number that asks for everything anew."""
MAX_BATCH_TOKENS: Final = 8192
"""A message ends with the event that reaches this: encoding holds Python's lock, which steps need too."""
EVENT_TOKENS: Final = 32
"""Size of an event in addition to its tokens."""
JOIN_TIMEOUT_S: Final = 2.0
LINGER_MS: Final = 200
"""How long the last messages may take when the publisher is closed."""


class EventPublisher:
    """Queues events for the thread that sends them. Closed when it is garbage.

    Args:
        rank: the number of the engine among those of its server, which messages contain.

    Raises:
        ConfigError: an endpoint is wrong or taken.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        self._sender = _Sender(config, rank)
        thread = Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._finalizer = finalize(self, _close, self._sender, thread)
        self._max_queue_size = config.max_queue_size
        self.num_dropped = 0
        """Events that found the queue full."""
        thread.start()

    @property
    def num_published(self) -> int:
        """Events sent."""
        return self._sender.num_published

    @property
    def endpoint(self) -> str:
        """The addresses of the events, with the port that was chosen if the configuration allows any."""
        return self._sender.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        return self._sender.replay_endpoint

    @property
    def is_behind(self) -> bool:
        """Whether more than half the queue is full."""
        return len(self._sender.queue) > self._max_queue_size // 2

    def publish(self, events: Sequence[CacheEvent]) -> bool:
        """Queue a step's events. When the queue is full they are counted and dropped; returns False then."""
        if len(self._sender.queue) >= self._max_queue_size or not self._sender.is_running:
            self.num_dropped += len(events)
            return False
        self._sender.queue.append((time.time(), events))
        self._sender.wake()
        return True

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a subscriber asks for everything anew."""
        return self._sender.restate_fd

    def take_restate_request(self) -> bool:
        """Return whether a subscriber has asked for everything anew since the last call."""
        try:
            return os.eventfd_read(self._sender.restate_fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Send what is queued, and close the sockets."""
        self._finalizer()


def _close(sender: "_Sender", thread: Thread) -> None:
    sender.is_stopped = True
    sender.wake()
    thread.join(JOIN_TIMEOUT_S)
    if not thread.is_alive():
        sender.close_descriptors()


class _Sender:
    """The sockets, and the thread's loop. Only the thread uses the sockets once it runs."""

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        self.queue: deque[tuple[float, Sequence[CacheEvent]]] = deque()
        self.num_published = 0
        self.is_running = True
        self.is_stopped = False
        self._topic = config.topic.encode()
        self._rank = rank
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._last_ts = 0.0
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.hwm)
            self.endpoint = (_bind if config.is_bound else _connect)(self._pub, config.endpoint)
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(0)
                self.replay_endpoint = _bind(self._replay, config.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.restate_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        """Let the thread look at the queue."""
        os.eventfd_write(self._wake_fd, 1)

    def close_descriptors(self) -> None:
        """Close what other threads use; the thread has ended."""
        os.close(self._wake_fd)
        os.close(self.restate_fd)

    def run(self) -> None:
        """Send and answer until the publisher is closed."""
        try:
            self._loop()
        except Exception:
            # The edge of the thread. The engine continues; the unsent events are counted as dropped.
            LOGGER.exception("cache events are not published any more")
        finally:
            self.is_running = False
            self._context.destroy(linger=LINGER_MS)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self.is_stopped or self.queue:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self.queue:
                self._send(*self.queue.popleft())
            if self._replay in ready and self._replay is not None:
                self._answer(self._replay)

    def _send(self, ts: float, events: Sequence[CacheEvent]) -> None:
        self._last_ts = max(self._last_ts, ts)
        for part in _batches(events):
            payload = encode_batch(self._last_ts, part, self._rank)
            self._pub.send_multipart((self._topic, self._next_number.to_bytes(8, "big"), payload))
            self._kept.append((self._next_number, payload))
            self._next_number += 1
            self.num_published += len(part)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer one request for missed messages."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            LOGGER.warning("ignored a malformed request for cache events")
            return
        client, _, asked = frames
        if asked == RESTATE:
            os.eventfd_write(self.restate_fd, 1)
        first = int.from_bytes(asked, "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _batches(events: Iterable[CacheEvent]) -> Iterator[list[CacheEvent]]:
    """Yield the events in order, divided into messages."""
    batch: list[CacheEvent] = []
    num_tokens = 0
    for event in events:
        batch.append(event)
        num_tokens += EVENT_TOKENS
        if isinstance(event, BlocksStored | SnapshotStored):
            num_tokens += len(event.tokens) // TOKEN_BYTES
        if num_tokens >= MAX_BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{FLAG}: cannot connect to endpoint {endpoint!r}: {error}") from error
    return endpoint


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind a socket; return the endpoint with its port."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{FLAG}: cannot bind to {endpoint!r}: {error}; choose another endpoint") from error
    return socket.get_string(zmq.LAST_ENDPOINT)
