"""Transfers between device memory and stores: dispatch to stores, and collection of completions.

A *store* keeps blocks and slots outside device memory: host memory, a disk, another engine. It numbers its own
addresses. Transfers begin in the order of the cache's actions and end in any order.
"""

from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from strandline.errors import EngineError
from strandline.ids import TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import (
    CancelTransfer,
    Completion,
    DropStored,
    EnterFiles,
    FoundFile,
    LoadIn,
    StoreOut,
)


class Store(Protocol):
    """Copies blocks and slots to addresses of its own, and back.

    ``load`` and ``store`` are called between steps, in the order of the cache's actions, and return without waiting for
    the copies. Each transfer is reported by exactly one completion, from any thread, when it no longer
    accesses device memory. Errors are also reported by a completion, not raised.
    """

    def load(self, action: LoadIn, arena: ArenaTensors) -> None:
        """Begin to write blocks and slots of the arena.

        Steps that were launched before may still read what is overwritten; on a GPU the copy comes after them. It is
        visible to every step that is launched after its completion.
        """

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Begin to read blocks and slots of the arena, as the steps that were launched before leave them.

        Later steps and actions may overwrite them: what is not read at once is copied aside. Of an action that is held,
        only a later ``load`` overwrites them, which waits.
        """

    def drop(self, addresses: Iterable[int]) -> None:
        """Free addresses. What was begun before may still read or write them; what begins later may reuse their memory.

        What is stored there then is written after those reads.
        """

    def cancel(self, transfer: TransferId) -> None:
        """End a transfer early, if it is under way and that is possible."""

    def close(self) -> None:
        """End all transfers; no more completions are reported."""


@runtime_checkable
class SharedStore(Protocol):
    """A store in whose files other engines store, too."""

    def enter(self, files: Iterable[FoundFile]) -> None:
        """Take in files that others have written, whose items can be loaded from now on."""

    def forget(self, files: Iterable[FoundFile]) -> None:
        """Forget files that others had written and that are gone."""


Completions = SimpleQueue[Completion]
"""Queue on which stores report the end of transfers."""


def drain(
    completions: Completions, under_way: MutableMapping[TransferId, Any], timeout_s: float = 0.0
) -> tuple[Completion, ...]:
    """Take all transfers that have ended out of both; wait until there is one, but at most this long."""
    ended = list[Completion]()
    with suppress(Empty):
        ended.append(completions.get(timeout=timeout_s))
        while True:
            ended.append(completions.get_nowait())
    for completion in ended:
        under_way.pop(completion.transfer, None)
    return tuple(ended)


class Transfers:
    """The stores of one device.

    Attributes:
        completions: queue of completions from the stores.
    """

    def __init__(self, arena: ArenaTensors) -> None:
        self._arena = arena
        self.completions: Completions = SimpleQueue()
        self._stores: dict[str, Store] = {}
        self._store_of: dict[TransferId, Store] = {}
        """By transfer that has not been reported: where to cancel it."""

    def attach(self, name: str, store: Store) -> None:
        """Carry out transfers that name this store with it."""
        self._stores[name] = store

    def begin(self, action: LoadIn | StoreOut | DropStored | EnterFiles | CancelTransfer) -> None:
        """Begin or cancel a transfer, or free, enter or forget addresses of a store.

        Raises:
            EngineError: no store of that name is attached, or it shares no files and some are to be entered.
        """
        match action:
            case CancelTransfer(transfer):
                if transfer in self._store_of:
                    self._store_of[transfer].cancel(transfer)
            case LoadIn(transfer, store):
                self._store_of[transfer] = self._find(store)
                self._find(store).load(action, self._arena)
            case StoreOut(transfer, store):
                self._store_of[transfer] = self._find(store)
                self._find(store).store(action, self._arena)
            case DropStored(store, addresses):
                self._find(store).drop(addresses)
            case EnterFiles(store, files, gone):
                shared = self._find(store)
                if not isinstance(shared, SharedStore):
                    raise EngineError(f"the store {store!r} shares no files")
                shared.enter(files)
                shared.forget(gone)

    def _find(self, name: str) -> Store:
        store = self._stores.get(name)
        if store is None:
            raise EngineError(f"a transfer names the store {name!r}; attached are {sorted(self._stores)}")
        return store

    def take(self) -> tuple[Completion, ...]:
        """Return the transfers that have ended since the last call, without waiting."""
        return drain(self.completions, self._store_of)

    def wait(self, timeout_s: float) -> tuple[Completion, ...]:
        """Return the transfers that have ended since the last call; wait until there is one, but at most this long."""
        return drain(self.completions, self._store_of, timeout_s)

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
