"""Follows the events of one engine: receives them in order, asks for missed ones, notices restarts.

A subscriber is *complete* while its index holds everything that the engine can resume. One that comes late, when the
engine has dropped its first messages, or one that missed messages which the engine no longer has, asks the engine to
state everything anew, and is complete again when that has come.
"""

from time import monotonic
from types import TracebackType
from typing import Final, Protocol

import zmq

from strandline.events.publisher import END_OF_REPLAY, RESTATE
from strandline.events.resumable import ResumableIndex
from strandline.events.wire import AllBlocksCleared, EventBatch, WireEvent, decode_batch

REPLAY_TIMEOUT_S: Final = 5.0


class EventSink(Protocol):
    """Takes the events of one engine."""

    def apply(self, event: WireEvent) -> None:
        """Record an event."""

    def clear(self) -> None:
        """Forget everything: events were missed."""


class Subscriber:
    """One engine's events, and the index that follows from them. Not thread-safe.

    Args:
        endpoint: where the engine publishes.
        replay_endpoint: where it answers requests for missed messages; None: nowhere, and missed messages are lost.
        topic: the engine's.
        sink: takes the events instead of ``index``, which stays empty then.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", *, sink: EventSink | None = None
    ) -> None:
        self.index = ResumableIndex()
        self._sink: EventSink = self.index if sink is None else sink
        self.is_complete = False
        self.num_missed = 0
        """Messages that did not come, or came late, in a replay."""
        self._next_number = 0
        self._last_ts = 0.0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(0)
        self._live.subscribe(topic.encode())
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def follow(self, timeout_s: float = 0.0) -> int:
        """Apply the messages that have arrived, waiting for the first one; return their number."""
        num_applied = 0
        while self._live.poll(0 if num_applied else int(timeout_s * 1000)):
            _, number, payload = self._live.recv_multipart()
            num_applied += self._receive(int.from_bytes(number, "big"), decode_batch(payload))
        return num_applied

    def catch_up(self, timeout_s: float = REPLAY_TIMEOUT_S) -> bool:
        """Apply all messages up to now, by a replay; ask for everything anew if that is not enough.

        Call it once after the start, and now and then: messages that are lost with none after them, and a restart with
        none since, are noticed here alone.

        Returns:
            Whether the engine answered in time.
        """
        answer = self._ask(max(self._next_number - 1, 0).to_bytes(8, "big"), timeout_s)
        if answer is not None and self._next_number and not self._continues(answer):
            self._lose(0)
            answer = self._ask((0).to_bytes(8, "big"), timeout_s)
        if answer is None:
            return False
        for number, batch in answer:
            if number > self._next_number:
                self._lose(number)
            if number == self._next_number:
                self._apply(number, batch)
        return self.is_complete or self._ask(RESTATE, timeout_s) is not None

    def _continues(self, answer: list[tuple[int, EventBatch]]) -> bool:
        """Return whether an answer that should begin with the last message applied is of the same engine process."""
        return bool(answer) and (answer[0][0] >= self._next_number or answer[0][1].ts == self._last_ts)

    def _ask(self, number: bytes, timeout_s: float) -> list[tuple[int, EventBatch]] | None:
        """Send a request; return the messages of the answer, or None if it is not complete in time."""
        if self._replay_endpoint is None:
            return None
        answer: list[tuple[int, EventBatch]] = []
        end_s = monotonic() + timeout_s
        with self._context.socket(zmq.DEALER) as socket:  # a new one: it cannot hold the remainder of an earlier answer
            socket.set_hwm(0)
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", number))
            while socket.poll(max(int((end_s - monotonic()) * 1000), 0)):
                _, answered, payload = socket.recv_multipart()
                if answered == END_OF_REPLAY:
                    return answer
                answer.append((int.from_bytes(answered, "big"), decode_batch(payload)))
        return None

    def _receive(self, number: int, batch: EventBatch) -> int:
        """Take a message of the live stream; return the number of messages applied."""
        is_known = number < self._next_number and batch.ts <= self._last_ts
        if is_known or batch.ts < self._last_ts:
            return 0  # replayed before it came, or of an engine process that is gone
        if number < self._next_number:
            self._lose(0)  # the engine has started again
        before = self._next_number
        if number > self._next_number:
            self.num_missed += number - self._next_number
            self.catch_up()
        if number > self._next_number:
            self._lose(number)
        if number == self._next_number:
            self._apply(number, batch)
        return max(self._next_number - before, 0)

    def _lose(self, next_number: int) -> None:
        """Begin at another message: the index is no longer right."""
        self.is_complete = False
        self._next_number = next_number
        self._sink.clear()

    def _apply(self, number: int, batch: EventBatch) -> None:
        self._next_number, self._last_ts = number + 1, batch.ts
        for event in batch.events:
            self._sink.apply(event)
            self.is_complete |= isinstance(event, AllBlocksCleared)
