"""Gives prefixes to engines that connect, each connection in a thread of its own."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Event, Lock, Thread
from typing import Final, Protocol, TypeVar

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import ConfigError
from strandline.kv_transfer_config import FLAG
from strandline.specs import ModelSpec
from strandline.transfer.connection import Cause, Connection, TransferError, failure_of
from strandline.transfer.counters import NOT_NEEDED, NOTHING, TransferCounters
from strandline.transfer.engine_calls import EngineCalls
from strandline.transfer.layout import Items, differences, pieces_of
from strandline.transfer.messages import Ask, Enough, Failed, Hello, Offer, Want
from strandline.transfer.movers import Content, Mover

LOGGER: Final = logging.getLogger("strandline.transfer")
MAX_CONNECTIONS: Final = 64
PAUSE_S: Final = 0.5
"""Pause after a connection could not be accepted, as when no file descriptor is free."""
Hold = TypeVar("Hold")


class Source(Protocol[Hold]):
    """What the engine does for the server."""

    def offer(self, ask: Ask) -> tuple[Hold, Offer] | None:
        """Keep what there is of a prompt until ``end``; None: nothing. Called in the engine's thread."""

    def read(self, hold: Hold, items: Items) -> memoryview:
        """Read a piece of what is kept. Called in threads of the connection."""

    def addresses(self, hold: Hold, items: Items) -> list[int]:
        """Return where each block and each slot of a piece lies, once it may be read. In the connection's thread."""

    def end(self, hold: Hold, is_done: bool) -> None:
        """Release it now or, if not everything has arrived, when its lease expires. In the engine's thread."""


class PullServer:
    """Listens for engines.

    Raises:
        ConfigError: the address is not there, or taken.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Hello,
        calls: EngineCalls,
        source: Source[Hold],
        spec: ModelSpec,
        mover: Mover,
        *,
        timeout_s: float,
        patience_s: float,
    ) -> None:
        """
        Args:
            address: host and port to listen on; 0: any free port.
            patience_s: how long an engine may take to answer an offer: its request may be queued.
        """
        self._hello, self._calls, self._spec, self._mover = hello, calls, spec, mover
        self.counters = TransferCounters()
        """Counters of the peers' pulls."""
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._serve_one: Callable[[Connection], None] = lambda connection: self._serve(connection, source)
        host, port = address
        try:
            self._listener = socket.create_server(address, family=_family(host))
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{FLAG}: cannot listen on kv_ip {host}, kv_port {port}: {error}") from error
        self.host: str = host
        self.port: int = self._listener.getsockname()[1]
        self._connections = set[Connection]()
        self._lock = Lock()
        self._is_closed = Event()
        Thread(target=self._accept, name="kv-transfer", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._is_closed.set()
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    LOGGER.warning("a connection of another engine could not be accepted: %s", error)
                self._is_closed.wait(PAUSE_S)
                continue
            connection = Connection(accepted, self._timeout_s)
            with self._lock:
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                connection.close()
            else:
                Thread(target=self._run, args=[connection], name="kv-transfer", daemon=True).start()

    def _run(self, connection: Connection) -> None:
        """Serve one connection until its end."""
        try:
            self._serve_one(connection)
        except TransferError as error:
            LOGGER.warning("a transfer to another engine has failed: %s", error)
            self.counters.count(error.cause)
            _tell(connection, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _serve(self, connection: Connection, source: Source[Hold]) -> None:
        hello, _ = connection.expect(Hello)
        connection.send(self._hello)
        if difference := differences(self._hello.layout, hello.layout):
            raise TransferError(Cause.REFUSED, difference)
        ask, _ = connection.expect(Ask)
        found = self._calls.call(source.offer, ask)
        if found is None:
            connection.send(Offer(0, []))
            self.counters.count(NOTHING)
            return
        hold, offer = found
        is_done = False
        try:
            connection.send(offer)
            is_done = self._serve_wanted(connection, source, hold, offer)
        finally:
            self._calls.submit(source.end, hold, is_done)

    def _serve_wanted(self, connection: Connection, source: Source[Hold], hold: Hold, offer: Offer) -> bool:
        """Send what is wanted; return whether it has arrived."""
        want, _ = connection.receive(patience_s=self._patience_s)
        if isinstance(want, Want):
            self._give(connection, source, hold, offer, want)
        elif isinstance(want, Failed):
            raise failure_of(want)
        elif isinstance(want, Enough):
            self.counters.count(NOT_NEEDED)
        else:
            raise TransferError(Cause.GARBLED, f"{type(want).__name__} came instead of Want")
        return True

    def _give(self, connection: Connection, source: Source[Hold], hold: Hold, offer: Offer, want: Want) -> None:
        offered = {position for position, _ in offer.snapshots}
        if want.first_block > offer.num_blocks or not offered.issuperset(want.positions):
            raise TransferError(Cause.GARBLED, "more is wanted than was offered")
        start_s = SYSTEM_CLOCK()
        pieces = list(pieces_of(want.first_block, want.positions, self._spec, past=offer.num_blocks))
        self._mover.give(connection, pieces, Content(partial(source.read, hold), partial(source.addresses, hold)))
        self.counters.count_done(sum(items.num_bytes for items in pieces), SYSTEM_CLOCK() - start_s)


def _tell(connection: Connection, error: TransferError) -> None:
    """Send the peer the reason why it gets nothing more, if it is still connected."""
    with suppress(TransferError):  # it does not
        connection.send(Failed(error.cause, str(error)))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
