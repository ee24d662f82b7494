"""How the bytes of a pull travel: the seam between its messages, which are always frames over TCP, and its content."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from strandline.transfer.checksum import checksum
from strandline.transfer.connection import Cause, Connection, TransferError
from strandline.transfer.layout import CHUNK_BYTES, Items
from strandline.transfer.messages import Enough, Piece

NUM_THREADS: Final = 3
"""Beside the one of the connection: checksums take longer than the bytes, and the device is read or written beside."""
SMALL_BYTES: Final = 4 * 2**20
"""So few bytes are moved sooner by one thread than others start."""
NUM_ROOMS: Final = 2
"""One piece is written while the next one comes."""
T = TypeVar("T")
Result = TypeVar("Result")


class Sink(NamedTuple):
    """Takes what comes of one pull, from several threads."""

    room: Callable[[int], memoryview]
    """Returns memory of that many bytes, which pieces are received in, one after the other."""
    write: Callable[[Items, memoryview], None]
    """Writes a piece. The memory is the mover's again when it returns."""


class Content(NamedTuple):
    """What one hold keeps."""

    read: Callable[[Items], memoryview]
    """Returns the bytes of a piece. Called from several threads."""
    addresses: Callable[[Items], list[int]]
    """Returns where each block and each slot of a piece lies, once it may be read there."""


class Mover(Protocol):
    """Moves the requested parts of a prefix from one engine to another. Any thread may call it."""

    @property
    def connector(self) -> str:
        """The name in ``--kv-transfer-config``, which must be the same on both sides."""

    def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
        """Give all pieces; return when the peer has them, until when they must be kept.

        Raises:
            TransferError: the peer does not have all of them.
        """

    def take(self, connection: Connection, pieces: Sequence[Items], sink: Sink) -> int:
        """Take all pieces, and return how many bytes they have. They are written when this returns.

        Raises:
            TransferError: it has failed; nothing that was written is to be used, and nothing writes any more.
        """

    def close(self) -> None:
        """Release what moves the bytes. No transfer follows."""


class SocketMover:
    """Sends the bytes after messages, in chunks with a checksum each.

    Reading, checksums, the connection and writing overlap, unless there is little to move: while one piece is sent, the
    next one is read; while one comes, the one before is written.
    """

    connector: Final = "SocketConnector"

    def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
        """Send all pieces, and wait until the peer has them. Raises as ``Mover.give``."""
        with _executor(pieces) as pool:
            chunks = _chunks(_ahead(pool, content.read, pieces))
            for piece, data, of_data in _ahead(pool, _with_checksum, chunks, NUM_THREADS):
                connection.send(piece, data, payload_checksum=of_data)
        connection.expect(Enough)

    def take(self, connection: Connection, pieces: Sequence[Items], sink: Sink) -> int:
        """Receive all pieces. Raises as ``Mover.take``."""
        most_bytes = max((items.num_bytes for items in pieces), default=0)
        rooms = [sink.room(most_bytes) for _ in pieces[:NUM_ROOMS]]
        writes: list[Future[None]] = []
        with _executor(pieces) as pool:  # which waits for them, also after a failure: their memory may then be freed
            for index, items in enumerate(pieces):
                if index >= NUM_ROOMS:
                    writes[index - NUM_ROOMS].result()
                data = rooms[index % NUM_ROOMS][: items.num_bytes]
                checks = [pool.submit(check) for check in _receive(connection, index, data)]
                writes.append(pool.submit(_write, checks, sink, items, data))
        for write in writes:
            write.result()
        connection.send(Enough())
        return sum(items.num_bytes for items in pieces)

    def close(self) -> None:
        """Do nothing: connections are closed by those who use them."""


class _InOneThread(Executor):
    """Runs what is submitted at once."""

    def submit(self, function: Callable[..., Result], /, *arguments: Any, **named: Any) -> Future[Result]:
        """Run a function. Raises what it raises."""
        future = Future[Result]()
        future.set_result(function(*arguments, **named))
        return future


def _executor(pieces: Iterable[Items]) -> Executor:
    """Return what runs the parts of a transfer, which ends when all have."""
    is_small = sum(items.num_bytes for items in pieces) <= SMALL_BYTES
    return _InOneThread() if is_small else ThreadPoolExecutor(NUM_THREADS, "kv-transfer")


def _ahead(
    pool: Executor, function: Callable[[T], Result], arguments: Iterable[T], num_ahead: int = 1
) -> Iterator[Result]:
    """Yield what a function returns for each argument, in order, and compute up to ``num_ahead`` more meanwhile."""
    waiting = deque[Future[Result]]()
    for argument in arguments:
        waiting.append(pool.submit(function, argument))
        if len(waiting) > num_ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _chunks(pieces: Iterable[memoryview]) -> Iterator[tuple[Piece, memoryview]]:
    """Yield the frames of pieces."""
    for index, data in enumerate(pieces):
        for start in range(0, len(data), CHUNK_BYTES):
            yield Piece(index, start), data[start : start + CHUNK_BYTES]


def _with_checksum(chunk: tuple[Piece, memoryview]) -> tuple[Piece, memoryview, int]:
    return *chunk, checksum(chunk[1])


def _receive(connection: Connection, index: int, data: memoryview) -> Iterator[Callable[[], None]]:
    """Receive a piece; yield what checks each chunk, as it comes."""
    for start in range(0, len(data), CHUNK_BYTES):
        piece, check = connection.expect_into(Piece, data[start : start + CHUNK_BYTES])
        if (piece.index, piece.start) != (index, start):
            raise TransferError(
                Cause.GARBLED, f"byte {piece.start} of piece {piece.index} came instead of {start} of {index}"
            )
        yield check


def _write(checks: Iterable[Future[None]], sink: Sink, items: Items, data: memoryview) -> None:
    """Write a piece once all of it has the right checksums. The checks were submitted before, so they end."""
    for check in checks:
        check.result()
    sink.write(items, data)
