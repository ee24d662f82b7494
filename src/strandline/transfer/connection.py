"""Frames over TCP: a message, and bytes after it. Every call ends within a time limit.

A frame is a head (``HEAD``: magic, length of the message, length of the bytes, checksum of the bytes and then of the
message), the message as msgpack, and the bytes. What is not a frame, is too long or does not have its checksum ends the
connection: nothing that follows it could be distinguished.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from struct import Struct
from time import monotonic
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

import msgspec

from strandline.transfer.checksum import checksum
from strandline.transfer.messages import DECODER, ENCODER, Failed, Message

HEAD: Final = Struct("!4sIQQ")
MAGIC: Final = b"SLT2"
MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Far more than the tokens of the longest prompt."""
MIN_RATE: Final = 16 * 2**20
"""Bytes per second below which a frame takes too long, beyond the time limit."""

Kind = TypeVar("Kind", bound=Message)
Room = TypeVar("Room", bytearray, memoryview)


class Cause(StrEnum):
    """Why a transfer has failed."""

    UNREACHABLE = "unreachable"
    """The peer does not take connections."""
    REFUSED = "refused"
    """The peer, or this engine, has another layout, other weights or another protocol."""
    STALLED = "stalled"
    """The peer sent nothing for too long."""
    DISCONNECTED = "disconnected"
    """The connection was lost."""
    GARBLED = "garbled"
    """What came was not what was expected."""
    GONE = "gone"
    """The peer does not have it any more."""
    NO_ROOM = "no_room"
    """The engine that fetches has no memory for it."""


class TransferError(Exception):
    """A transfer has failed; nothing of it is used."""

    def __init__(self, cause: Cause, text: str) -> None:
        super().__init__(f"{cause}: {text}")
        self.cause = cause


class Frame(NamedTuple):
    """A message, and the bytes after it."""

    message: Message
    payload: bytearray | memoryview


class _Arrived(NamedTuple):
    """A frame whose checksum has not been compared."""

    data: bytearray
    payload: bytearray | memoryview
    checksum: int

    def check(self) -> None:
        """Compare the checksum. Other threads run meanwhile.

        Raises:
            TransferError: it is another one.
        """
        if checksum(self.data, checksum(self.payload)) != self.checksum:
            raise TransferError(Cause.GARBLED, "a frame has another checksum than its sender computed")

    def message(self) -> Message:
        """Decode the message.

        Raises:
            TransferError: it is none.
        """
        try:
            message: Message = DECODER.decode(self.data)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise TransferError(Cause.GARBLED, f"not a message: {error}") from error
        return message


class Connection:
    """One side of a connection. Closed with its context.

    Args:
        timeout_s: most seconds that the peer may take to send or to read anything.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(timeout_s)
        self._socket = connected
        self.timeout_s: float = timeout_s
        self.is_closed = False
        """Whether this side has closed it."""

    @classmethod
    def to(cls, host: str, port: int, timeout_s: float) -> "Connection":
        """Connect to a peer.

        Raises:
            TransferError: it does not take connections.
        """
        try:
            return cls(socket.create_connection((host, port), timeout_s), timeout_s)
        except (OSError, UnicodeError, OverflowError) as error:
            raise TransferError(Cause.UNREACHABLE, f"{host}:{port}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the peer notices. Any thread may call it, and calls under way fail."""
        self.is_closed = True
        with suppress(OSError):  # the peer has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(
        self, message: Message, payload: bytes | bytearray | memoryview = b"", *, payload_checksum: int | None = None
    ) -> None:
        """Send a frame.

        Args:
            payload_checksum: checksum of the bytes, if it is known already.

        Raises:
            TransferError: the peer has gone, or does not read.
        """
        data = ENCODER.encode(message)
        of_both = checksum(data, checksum(payload) if payload_checksum is None else payload_checksum)
        head = HEAD.pack(MAGIC, len(data), len(payload), of_both)
        try:
            self._socket.settimeout(self.timeout_s + len(payload) / MIN_RATE)
            self._socket.sendall(head + data)
            if payload:
                self._socket.sendall(payload)
        except TimeoutError as error:
            raise TransferError(Cause.STALLED, "the peer does not read") from error
        except OSError as error:
            raise TransferError(Cause.DISCONNECTED, str(error)) from error

    def receive(self, max_payload_bytes: int = 0, *, patience_s: float = 0.0) -> Frame:
        """Receive a frame.

        Args:
            patience_s: how much longer than usual the peer may take to begin.

        Raises:
            TransferError: the peer has gone, is too slow, or does not send a frame of this size.
        """
        arrived = self._arrive(max_payload_bytes, lambda size: memoryview(bytearray(size)), patience_s)
        arrived.check()
        return Frame(arrived.message(), arrived.payload)

    def _arrive(self, max_payload_bytes: int, room: Callable[[int], memoryview], patience_s: float) -> _Arrived:
        """Receive a frame without comparing its checksum. Raises as ``receive``.

        Args:
            room: returns memory for that many bytes.
        """
        deadline = monotonic() + self.timeout_s + patience_s
        magic, message_bytes, payload_bytes, expected = HEAD.unpack(self._read(bytearray(HEAD.size), deadline))
        if magic != MAGIC:
            raise TransferError(Cause.GARBLED, f"no frame begins with {magic!r}")
        if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > max_payload_bytes:
            raise TransferError(
                Cause.GARBLED,
                f"a frame of {message_bytes} and {payload_bytes} bytes, "
                f"where {MAX_MESSAGE_BYTES} and {max_payload_bytes} are the most",
            )
        deadline += (message_bytes + payload_bytes) / MIN_RATE
        data = self._read(bytearray(message_bytes), deadline)
        return _Arrived(data, self._read(room(payload_bytes), deadline), expected)

    def expect(
        self, kind: type[Kind], payload_bytes: int = 0, *, patience_s: float = 0.0
    ) -> tuple[Kind, bytearray | memoryview]:
        """Receive a frame of this kind, with ``payload_bytes`` bytes after its message.

        Args:
            patience_s: see ``receive``.

        Raises:
            TransferError: as ``receive``; another frame came; or the peer reports a failure.
        """
        message, payload = self.receive(payload_bytes, patience_s=patience_s)
        return _require(kind, message, len(payload), payload_bytes), payload

    def expect_into(self, kind: type[Kind], room: memoryview) -> tuple[Kind, Callable[[], None]]:
        """Receive a frame of this kind, whose bytes fill ``room``.

        Returns:
            Its message; and what compares its checksum, in any thread, and raises ``TransferError`` if that is another
            one. Before that, neither the message nor the bytes are to be believed.

        Raises:
            TransferError: as ``expect``.
        """
        arrived = self._arrive(len(room), lambda size: room[:size], 0.0)
        return _require(kind, arrived.message(), len(arrived.payload), len(room)), arrived.check

    def _read(self, room: Room, deadline: float) -> Room:
        """Fill memory."""
        with memoryview(room) as view:
            start = 0
            while start < len(view):
                start += self._read_into(view[start:], deadline)
        return room

    def _read_into(self, view: memoryview, deadline: float) -> int:
        left_s = deadline - monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            num_bytes = self._socket.recv_into(view)
        except TimeoutError as error:
            raise TransferError(Cause.STALLED, "the peer sends nothing, or too slowly") from error
        except OSError as error:
            raise TransferError(Cause.DISCONNECTED, str(error)) from error
        if not num_bytes:
            raise TransferError(Cause.DISCONNECTED, "the peer has closed the connection")
        return num_bytes


def _require(kind: type[Kind], message: Message, num_bytes: int, wanted_bytes: int) -> Kind:
    """Return a message that is of this kind, and has as many bytes after it as wanted. Raises as ``expect``."""
    if isinstance(message, Failed):
        raise failure_of(message)
    if not isinstance(message, kind) or num_bytes != wanted_bytes:
        raise TransferError(
            Cause.GARBLED,
            f"{type(message).__name__} with {num_bytes} bytes came instead of {kind.__name__} with {wanted_bytes}",
        )
    return message


def failure_of(failed: Failed) -> TransferError:
    """Return the error of a peer that has failed. A cause that no ``Cause`` has is garbled."""
    is_known = failed.cause in Cause.__members__.values()
    return TransferError(Cause(failed.cause) if is_known else Cause.GARBLED, failed.reason)
