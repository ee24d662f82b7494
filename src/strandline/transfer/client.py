"""Fetches a prefix from another engine, in a thread; the engine's thread reserves memory for it and writes it."""

from collections import deque
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from strandline.specs import ModelSpec
from strandline.transfer.connection import Cause, Connection, TransferError
from strandline.transfer.engine_calls import EngineCalls, wait
from strandline.transfer.layout import Items, differences, pieces_of
from strandline.transfer.messages import Ask, Enough, Hello, Offer, Piece, Want

WRITE_BEHIND = 32
"""Pieces of one pull that have arrived and are not written: an engine writes between its steps alone."""


class Peer(NamedTuple):
    """Where a prefix can be fetched."""

    host: str
    port: int
    engine_id: str
    """Which engine should be there; empty: any."""


class Sink(Protocol):
    """What the engine does for a pull, in its own thread."""

    def reserve(self, offer: Offer) -> Want | None:
        """Reserve memory for what is missing of an offer; None: nothing is.

        Raises:
            TransferError: there is no memory for it.
        """

    def write(self, items: Items, data: bytearray) -> None:
        """Write a piece into what was reserved."""


def pull(
    peer: Peer, hello: Hello, ask: Ask, sink: Sink, calls: EngineCalls, spec: ModelSpec, *, timeout_s: float
) -> int:
    """Fetch what is missing of a prompt; return how many bytes came. All of it is written when this returns.

    Raises:
        TransferError: it has failed. What was written is not to be used.
    """
    with Connection.to(peer.host, peer.port, timeout_s) as connection:
        connection.send(hello)
        theirs, _ = connection.expect(Hello)
        if difference := differences(hello.layout, theirs.layout):
            raise TransferError(Cause.REFUSED, difference)
        if peer.engine_id not in ("", theirs.engine_id):
            raise TransferError(Cause.GONE, f"engine {theirs.engine_id} has taken the place of {peer.engine_id}")
        connection.send(ask)
        offer, _ = connection.expect(Offer)
        if not offer.num_tokens:
            return 0
        if not offer.is_consistent(len(ask.tokens)):
            raise TransferError(Cause.GARBLED, "an offer contradicts itself or goes beyond the prompt")
        want = calls.call(sink.reserve, offer)
        if want is None:
            connection.send(Enough())
            return 0
        connection.send(want)
        num_bytes = _receive(connection, offer, want, sink, calls, spec)
        connection.send(Enough())
        return num_bytes


def _receive(connection: Connection, offer: Offer, want: Want, sink: Sink, calls: EngineCalls, spec: ModelSpec) -> int:
    writes: deque[Future[None]] = deque()
    num_bytes = 0
    for index, items in enumerate(pieces_of(want.first_block, offer.num_blocks, want.positions, spec)):
        piece, data = connection.expect(Piece, items.num_bytes)
        if piece.index != index:
            raise TransferError(Cause.GARBLED, f"piece {piece.index} came in place of {index}")
        if len(writes) == WRITE_BEHIND:
            wait(writes.popleft())
        writes.append(calls.submit(sink.write, items, data))
        num_bytes += len(data)
    for write in writes:
        wait(write)
    return num_bytes
