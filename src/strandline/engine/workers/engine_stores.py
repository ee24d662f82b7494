"""Stores in the engine's process, where steps run in workers: transfers of these are begun here, and not by workers."""

from collections.abc import Sequence
from queue import SimpleQueue

from strandline.device.stores.peer_store import PeerStore
from strandline.device.stores.transfers import Completions, drain
from strandline.ids import TransferId
from strandline.records.actions import Action, CancelTransfer, Completion, LoadIn


class EngineStores:
    """Stores by name, and their transfers. All methods belong to the engine's thread.

    Attributes:
        completions: what stores report to, from any thread.
    """

    def __init__(self) -> None:
        self.completions: Completions = SimpleQueue()
        self._stores: dict[str, PeerStore] = {}
        self._store_of: dict[TransferId, PeerStore] = {}
        """By transfer that has not been reported."""

    def __len__(self) -> int:
        """Return how many transfers have not been reported."""
        return len(self._store_of)

    def attach(self, name: str, store: PeerStore) -> None:
        """Carry out transfers that name this store with it."""
        self._stores[name] = store

    def split(self, actions: Sequence[Action]) -> tuple[list[Action], list[Action]]:
        """Return the actions for these stores, to be begun once workers have been sent the others; and the others."""
        own, others = list[Action](), list[Action]()
        for action in actions:
            match action:
                case LoadIn(transfer, store) if store in self._stores:
                    self._store_of[transfer] = self._stores[store]
                    own.append(action)
                case CancelTransfer(transfer) if transfer in self._store_of:
                    own.append(action)
                case _:
                    others.append(action)
        return own, others

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin and cancel transfers of these stores."""
        for action in actions:
            match action:
                case LoadIn(transfer):
                    self._store_of[transfer].load(action)
                case CancelTransfer(transfer):
                    self._store_of[transfer].cancel(transfer)

    def take(self, timeout_s: float = 0.0) -> tuple[Completion, ...]:
        """Return the transfers that have ended since the last call; if any is under way, wait for one, or so long."""
        return drain(self.completions, self._store_of, timeout_s if self._store_of else 0.0)

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
