"""Fetches a prefix from another engine, in threads of the caller: first what there is, then what is missing."""

from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from strandline.specs import ModelSpec
from strandline.transfer.connection import Cause, Connection, TransferError
from strandline.transfer.layout import differences, pieces_of
from strandline.transfer.messages import Ask, Enough, Hello, Offer, Want
from strandline.transfer.movers import Mover, Sink


class Peer(NamedTuple):
    """Where a prefix can be fetched."""

    host: str
    port: int
    engine_id: str
    """Which engine should be there; empty: any."""


class Pull:
    """What one engine fetches of one prompt. Ends with ``fetch``, ``enough`` or ``close``."""

    def __init__(self, peer: Peer, hello: Hello, spec: ModelSpec, mover: Mover, *, timeout_s: float) -> None:
        self.peer = peer
        self._hello = hello
        self._spec = spec
        self._mover = mover
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._offer: Offer | None = None
        self._lock = Lock()
        self._is_closed = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the prefix that was offered."""
        return 0 if self._offer is None else self._offer.num_blocks

    def ask(self, ask: Ask) -> Offer:
        """Connect, and ask what there is of a prompt. What is offered is kept until the pull ends.

        Raises:
            TransferError: it has failed, or was closed.
        """
        connection = Connection.to(self.peer.host, self.peer.port, self._timeout_s)
        with self._lock:
            self._connection = connection
            if self._is_closed:
                connection.close()
        connection.send(self._hello)
        theirs, _ = connection.expect(Hello)
        if difference := differences(self._hello.layout, theirs.layout):
            raise TransferError(Cause.REFUSED, difference)
        if self.peer.engine_id not in ("", theirs.engine_id):
            raise TransferError(Cause.GONE, f"engine {theirs.engine_id} has taken the place of {self.peer.engine_id}")
        connection.send(ask)
        offer, _ = connection.expect(Offer)
        if offer.num_tokens and not offer.is_consistent(len(ask.tokens)):
            raise TransferError(Cause.GARBLED, "an offer contradicts itself or goes beyond the prompt")
        self._offer = offer
        return offer

    def fetch(self, want: Want, sink: Sink) -> int:
        """Fetch a part of what was offered; return how many bytes came. All of it is written when this returns.

        Args:
            sink: takes each piece as it comes.

        Raises:
            TransferError: it has failed, or was closed. What was written is not to be used.
        """
        connection, offer = self._connection, self._offer
        if connection is None or offer is None:
            raise TransferError(Cause.GONE, "nothing was offered")
        try:
            connection.send(want)
            pieces = list(pieces_of(want.first_block, want.positions, self._spec, past=offer.num_blocks))
            return self._mover.take(connection, pieces, sink)
        finally:
            self.close()

    def enough(self) -> None:
        """End the pull without fetching: nothing is missing, and the peer need not keep it any longer."""
        if self._connection is not None and self._offer is not None and not self._is_closed:
            with suppress(TransferError):  # it keeps nothing any more
                self._connection.send(Enough())
        self.close()

    def close(self) -> None:
        """End the pull. Any thread may call it; a call under way fails."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
