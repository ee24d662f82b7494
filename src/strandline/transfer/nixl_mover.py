"""Moves bytes by NIXL: the engine that fetches reads the other one's memory, by RDMA where there is a network for it.

The engine that gives sends the addresses in its arena, which its agent has registered, and takes
no further part. What is read arrives in a buffer of the reading engine and is written to its arena from there: a read
that does not end when its time is over can then overwrite nothing that is used. Such a buffer is never used again.

The memory may be reused as soon as its hold ends, and the reader would not notice. So what was read counts only if the
connection still stands after the last read: the giving side answers ``Enough`` while it keeps everything.

Needs ``strandline[nixl]``. Source: the interface of ``nixl._api``.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import ConfigError
from strandline.kv_transfer_config import FLAG
from strandline.transfer.connection import MIN_RATE, Cause, Connection, TransferError
from strandline.transfer.layout import Items
from strandline.transfer.messages import Enough, Placed
from strandline.transfer.movers import Content, Sink

CONNECTOR: Final = "NixlConnector"
POLL_S: Final = 0.0005
MAX_IDLE_PEERS: Final = 32
"""Peers that stay connected while nothing is read from them: the first read takes up to seconds."""


class Region(NamedTuple):
    """Memory that peers may read."""

    address: int
    num_bytes: int
    device: int | None
    """The GPU that it belongs to; None: the host."""

    @property
    def kind(self) -> Literal["DRAM", "VRAM"]:
        """NIXL's name of the kind of memory."""
        return "DRAM" if self.device is None else "VRAM"


@dataclass(slots=True)
class _Peer:
    """A peer's agent, as registered with this one."""

    name: str
    num_users: int = 0
    is_lost: bool = False


class NixlMover:
    """Reads from other engines' memory, and lets them read a region of this one's.

    Args:
        name: a name of the agent that no other one has, nor had.
        backends: NIXL's plugins.

    Raises:
        ConfigError: NIXL is not installed, or a plugin is missing or does not start.
    """

    connector: Final = CONNECTOR

    def __init__(self, name: str, region: Region, backends: Sequence[str]) -> None:
        if find_spec("nixl") is None:
            raise ConfigError(f"{FLAG}: {CONNECTOR} needs NIXL: pip install 'strandline[nixl]'")
        api = import_module("nixl._api")
        bindings = import_module("nixl._bindings")
        self._errors = _errors_of(bindings)
        self._not_found: type[Exception] = bindings.nixlNotFoundError
        self._region = region
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=list(backends), sync_mode=sync))
        except self._errors as error:
            raise ConfigError(f"{FLAG}: NIXL does not start with {', '.join(backends)}: {error}") from error
        if missing := [backend for backend in backends if backend not in self._agent.backends]:
            known = ", ".join(sorted(self._agent.get_plugin_list()))
            raise ConfigError(f"{FLAG}: NIXL has no backend {', '.join(missing)}; known are {known}")
        at = [(region.address, region.num_bytes, region.device or 0, "")]
        self._registered = self._agent.register_memory(at, region.kind)
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._lock = Lock()
        self._peers: dict[bytes, _Peer] = {}
        """By metadata; the one used last comes last."""
        self._buffers: list[np.ndarray] = []
        """Registered memory to read into that is free."""
        self._unending: list[tuple[Any, np.ndarray]] = []
        """Reads that could not be ended, and their memory."""

    def give(self, connection: Connection, pieces: Sequence[Items], content: Content) -> None:
        """Send the addresses of all pieces, and wait until the peer has read them. Raises as ``Mover.give``."""
        addresses = [address for items in pieces for address in content.addresses(items)]
        connection.send(Placed(self._metadata, self._region.kind, self._region.device or 0, addresses))
        connection.expect(Enough, patience_s=sum(items.num_bytes for items in pieces) / MIN_RATE)
        connection.send(Enough())

    def take(self, connection: Connection, pieces: Sequence[Items], sink: Sink) -> int:
        """Read all pieces. Raises as ``Mover.take``."""
        placed, _ = connection.expect(Placed)
        if len(placed.addresses) != sum(items.num_entries for items in pieces):
            raise TransferError(Cause.GARBLED, f"{len(placed.addresses)} addresses came for {len(pieces)} pieces")
        start, num_bytes = 0, 0
        with self._using(placed.agent) as peer:
            for items in pieces:
                end = start + items.num_entries
                there = _rows(placed.addresses[start:end], items.num_bytes, placed.device)
                with self._buffer(items.num_bytes) as buffer:
                    self._read(connection, peer, there, placed.kind, buffer)
                    sink.write(items, buffer.data[: items.num_bytes])
                start, num_bytes = end, num_bytes + items.num_bytes
        connection.send(Enough())
        connection.expect(Enough)
        return num_bytes

    def close(self) -> None:
        """Forget all peers, and let none read any more."""
        with self._lock:
            for metadata in list(self._peers):
                self._forget(metadata)
            with suppress(*self._errors):  # it is being read
                self._agent.deregister_memory(self._registered)

    def _read(self, connection: Connection, peer: str, there: np.ndarray, kind: str, buffer: np.ndarray) -> None:
        """Read rows of (address, bytes, device) of a peer into the beginning of a buffer, in order."""
        sizes = there[:, 1]
        here = np.stack([buffer.ctypes.data + np.cumsum(sizes) - sizes, sizes, np.zeros_like(sizes)], axis=1)
        agent, deadline = self._agent, SYSTEM_CLOCK() + connection.timeout_s + int(sizes.sum()) / MIN_RATE
        handle = None
        try:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, kind), peer
            )
            state = agent.transfer(handle)
            while state == "PROC":
                if SYSTEM_CLOCK() > deadline:
                    raise TransferError(Cause.STALLED, "the peer's memory is read too slowly")
                if connection.is_closed:
                    raise TransferError(Cause.DISCONNECTED, "the pull has ended")
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
        except self._not_found as error:
            raise TransferError(Cause.GARBLED, f"the peer has not registered what it offers: {error}") from error
        except self._errors as error:
            raise TransferError(Cause.DISCONNECTED, f"NIXL: {error}") from error
        finally:
            self._release(handle, buffer)
        if state != "DONE":
            raise TransferError(Cause.DISCONNECTED, f"NIXL: the read has ended as {state}")

    def _release(self, handle: Any, buffer: np.ndarray) -> None:
        """Release a read; remember it, with its memory, if it cannot be ended."""
        if handle is None:
            return
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors:
            self._unending.append((handle, buffer))

    @contextmanager
    def _buffer(self, num_bytes: int) -> Iterator[np.ndarray]:
        """Yield registered memory that nothing else uses; keep it for the next read, unless this one has not ended."""
        with self._lock:
            found = next((index for index, free in enumerate(self._buffers) if len(free) >= num_bytes), None)
            buffer = None if found is None else self._buffers.pop(found)
        if buffer is None:
            buffer = np.empty(num_bytes, np.uint8)
            self._register(buffer)
        try:
            yield buffer
        finally:
            with self._lock:
                if all(buffer is not used for _, used in self._unending):
                    self._buffers.append(buffer)

    def _register(self, buffer: np.ndarray) -> None:
        try:
            self._agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
        except self._errors as error:
            raise TransferError(Cause.NO_ROOM, f"{buffer.nbytes} bytes cannot be registered: {error}") from error

    @contextmanager
    def _using(self, metadata: bytes) -> Iterator[str]:
        """Yield the name of a peer's agent. After a failure its connection is given up, and the next use opens another.

        Raises:
            TransferError: the peer cannot be reached; or its connection has failed, and other reads still use it.
        """
        with self._lock:
            peer = self._peers.pop(metadata, None) or self._connect(metadata)
            self._peers[metadata] = peer
            if peer.is_lost:
                raise TransferError(Cause.DISCONNECTED, "the connection to its memory was lost and is being closed")
            peer.num_users += 1
        try:
            yield peer.name
        except TransferError:
            peer.is_lost = True
            raise
        finally:
            with self._lock:
                peer.num_users -= 1
                self._forget_unused()

    def _connect(self, metadata: bytes) -> _Peer:
        try:
            name = self._agent.add_remote_agent(metadata)
            return _Peer(name if isinstance(name, str) else name.decode())
        except UnicodeError as error:
            raise TransferError(Cause.GARBLED, f"an agent's name is not text: {error}") from error
        except self._errors as error:
            raise TransferError(Cause.GARBLED, f"NIXL: {error}") from error

    def _forget_unused(self) -> None:
        idle = [metadata for metadata, peer in self._peers.items() if not peer.num_users]
        num_surplus = max(len(idle) - MAX_IDLE_PEERS, 0)
        for index, metadata in enumerate(idle):
            if index < num_surplus or self._peers[metadata].is_lost:
                self._forget(metadata)

    def _forget(self, metadata: bytes) -> None:
        with suppress(*self._errors):  # it has gone
            self._agent.remove_remote_agent(self._peers.pop(metadata).name)


def _errors_of(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """Return the classes of NIXL's errors, which have nothing in common."""
    return tuple(value for name, value in vars(bindings).items() if name.endswith("Error"))


def _rows(addresses: Sequence[int], num_bytes: int, device: int) -> np.ndarray:
    """Return a row of (address, bytes, device) for each address; all have the same number of bytes."""
    at = np.array(addresses, np.uint64)
    return np.stack([at, np.full_like(at, num_bytes // len(at)), np.full_like(at, device)], axis=1)
