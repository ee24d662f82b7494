"""How the bytes of a pull travel: the seam between its messages, which are always frames over TCP, and its content."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from strandline.transfer.connection import Cause, Connection, TransferError
from strandline.transfer.layout import Items
from strandline.transfer.messages import Enough, Piece

Write = Callable[[Items, bytearray | memoryview], None]
"""Takes a piece as it comes. The bytes are the mover's again when it returns."""


class Content(NamedTuple):
    """What one hold keeps."""

    read: Callable[[Items], memoryview]
    """Returns the bytes of a piece."""
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

    def take(self, connection: Connection, pieces: Sequence[Items], write: Write) -> int:
        """Take all pieces, and return how many bytes they have. They are written when this returns.

        Raises:
            TransferError: it has failed; nothing that was written is to be used.
        """

    def close(self) -> None:
        """Release what moves the bytes. No transfer follows."""


class SocketMover:
    """Sends the bytes behind messages, with a checksum each."""

    connector: Final = "SocketConnector"

    def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
        """Send all pieces, and wait until the peer has them. Raises as ``Mover.give``."""
        for index, items in enumerate(pieces):
            connection.send(Piece(index), content.read(items))
        connection.expect(Enough)

    def take(self, connection: Connection, pieces: Sequence[Items], write: Write) -> int:
        """Receive all pieces. Raises as ``Mover.take``."""
        num_bytes = 0
        for index, items in enumerate(pieces):
            piece, data = connection.expect(Piece, items.num_bytes)
            if piece.index != index:
                raise TransferError(Cause.GARBLED, f"piece {piece.index} came instead of {index}")
            write(items, data)
            num_bytes += len(data)
        connection.send(Enough())
        return num_bytes

    def close(self) -> None:
        """Do nothing: connections are closed by those who use them."""
