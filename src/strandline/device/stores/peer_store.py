"""The store of what other engines offer: a load is a pull, which writes to the arena in a thread of its own."""

import logging
from collections.abc import Iterable
from threading import Thread
from typing import Final

from strandline.clock import SYSTEM_CLOCK
from strandline.device.stores.arena_copies import Copies, Entries, Fence, of_lifetime
from strandline.device.stores.transfers import Completions
from strandline.errors import EngineError
from strandline.ids import TransferId
from strandline.kernels.arena import ArenaTensors
from strandline.records.actions import Completion, LoadIn, StoreOut
from strandline.transfer.client import Pull
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.counters import NOT_NEEDED, TransferCounters
from strandline.transfer.layout import Items
from strandline.transfer.messages import Want
from strandline.transfer.movers import Sink

LOGGER: Final = logging.getLogger("strandline.transfer")
PEERS: Final = "peers"
"""The store's name."""
ADDRESSES: Final = 2**32
"""Addresses of one pull: a block's is its index in the prompt, a snapshot's its position."""


class PeerStore:
    """Pulls whose prefixes can be loaded. All methods belong to the thread that launches steps."""

    def __init__(self, copies: Copies, completions: Completions) -> None:
        self._copies = copies
        self._completions = completions
        self._pulls: dict[int, Pull] = {}
        self._num_opened = 0
        self._pull_of: dict[TransferId, Pull] = {}
        self.counters = TransferCounters()
        """Counters of pulls that have ended."""

    def open(self, pull: Pull) -> int:
        """Take a pull that has an offer; return the address that its addresses begin at."""
        self._num_opened += 1
        first = self._num_opened * ADDRESSES
        self._pulls[first] = pull
        return first

    def forget(self, first: int, outcome: str = NOT_NEEDED) -> None:
        """End a pull, unless a load has done so, and count it by its outcome."""
        pull = self._pulls.pop(first, None)
        if pull is not None:
            pull.enough()
            self.counters.count(outcome)

    def load(self, action: LoadIn, arena: ArenaTensors | None = None) -> None:
        """Begin to fetch what an action names, of one pull."""
        address = action.addresses[0]
        pull = self._pulls.pop(address - address % ADDRESSES, None)
        if pull is None:
            self._completions.put(Completion(action.transfer, is_done=False))
            return
        self._pull_of[action.transfer] = pull
        Thread(target=self._run, args=[action, pull, self._copies.fence()], name="kv-transfer", daemon=True).start()

    def store(self, action: StoreOut, arena: ArenaTensors) -> None:
        """Refuse: other engines fetch, they are not sent anything."""
        raise EngineError(f"nothing can be stored to {PEERS!r}")

    def drop(self, addresses: Iterable[int]) -> None:
        """Refuse: addresses are those of pulls, which the cache does not own."""
        raise EngineError(f"nothing of {PEERS!r} can be dropped")

    def cancel(self, transfer: TransferId) -> None:
        """End a pull that is under way."""
        pull = self._pull_of.get(transfer)
        if pull is not None:
            pull.close()

    def close(self) -> None:
        """End all pulls."""
        for pull in (*self._pulls.values(), *list(self._pull_of.values())):
            pull.close()
        self._pulls.clear()

    def _run(self, action: LoadIn, pull: Pull, fence: Fence) -> None:
        """Fetch and report, in a thread."""
        start_s, is_done = SYSTEM_CLOCK(), False
        try:
            num_bytes = self._fetch(action, pull, fence)
            self.counters.count_done(num_bytes, SYSTEM_CLOCK() - start_s)
            is_done = True
        except TransferError as error:
            self.counters.count(error.cause)
            LOGGER.warning("a prefix could not be fetched from %s:%d and is computed: %s", *pull.peer[:2], error)
        except Exception:
            # The edge of the thread. Without a completion, requests would wait for ever.
            self.counters.count(Cause.NO_ROOM)
            LOGGER.exception("a prefix could not be written and is computed")
        finally:
            pull.close()
            self._pull_of.pop(action.transfer, None)
            self._completions.put(Completion(action.transfer, is_done, SYSTEM_CLOCK() - start_s))

    def _fetch(self, action: LoadIn, pull: Pull, fence: Fence) -> int:
        block_at = {address % ADDRESSES: block for block, address in action.blocks}
        state_at = {each.address % ADDRESSES: each for each in action.snapshots}

        def write(items: Items, data: memoryview) -> None:
            blocks = [block_at[index] for index in range(items.start_block, items.end_block)]
            slots = [state_at[position].slot for position in items.positions]
            window = state_at[items.window_of].windows[items.lifetime - 1] if items.num_window_blocks else ()
            self._copies.write(Entries(blocks, slots, of_lifetime(items.lifetime, window)), data, fence)

        want = Want(min(block_at, default=pull.num_blocks), sorted(state_at))
        return pull.fetch(want, Sink(self._copies.room, write))
