"""What this engine keeps for others and gives to them: the prompts of requests that others continue, and its cache.

A prompt is kept under a lease until it has been fetched, its time is over, or its memory is needed for requests that
could not run otherwise. What is being fetched is kept until that has ended. Without a lease, or after one, whatever is
cached of a prompt is offered.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from strandline.cache import Lease, PrefixCache
from strandline.cache.holds import Holds
from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.device.stores.arena_copies import Copies, Entries, Fence, of_lifetime
from strandline.ids import RequestId
from strandline.records.tokens import TOKEN_BYTES, TokenBuffer
from strandline.records.transfer_params import TransferParams
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.layout import Items
from strandline.transfer.messages import Ask, Offer

MAX_KEPT_SHARE: Final = 0.5
"""The share of memory for leases; the oldest are given up for new ones."""
FETCHED: Final = "fetched"
EXPIRED: Final = "expired"
GIVEN_UP: Final = "given_up"
"""How leases end."""


@dataclass(slots=True, eq=False)
class Kept:
    """A prompt that is kept for the engine that continues it."""

    lease_id: str
    hold: Lease
    expires_s: float
    num_readers: int = 0
    """Pulls under way. It is kept until they have ended."""
    is_fetched: bool = False
    fence: Fence = None
    """After all that has written it; copies do not wait for what is launched later."""
    is_fenced: bool = False
    """Whether there is a fence yet, which on a CPU is None."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A prefix that another engine fetches, or decides about."""

    hold: Lease
    fence: Fence
    kept: Kept | None
    """The lease that it is fetched under."""


class PrefixSource:
    """The source of a ``PullServer``. All methods but ``read`` and ``addresses`` belong to the engine's thread.

    Args:
        carry_out: carries out the cache's actions, so that what is kept is where the cache expects it.
        lease_s: how long a prompt is kept.
    """

    def __init__(
        self,
        cache: PrefixCache,
        copies: Copies,
        carry_out: Callable[[], None],
        *,
        blocks_per_slab: int,
        window_blocks_per_slab: tuple[int, ...],
        lease_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cache = cache
        self._holds = Holds(cache)
        self._copies = copies
        self._carry_out = carry_out
        self._blocks_per_slab = blocks_per_slab
        self._window_blocks_per_slab = window_blocks_per_slab
        self._lease_s = lease_s
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        """By lease id; the oldest first."""
        self.ended: Counter[str] = Counter()
        """Leases that have ended: ``fetched``, ``expired`` or ``given_up``."""
        self._num_holds = 0

    @property
    def num_leases(self) -> int:
        """Prompts that are kept for other engines now."""
        return len(self._kept)

    def keep(self, tokens: TokenBuffer, salt: str) -> Kept | None:
        """Keep the prefix of a request that has ended; None: there is nothing of it, or no memory."""
        hold = self._hold(tokens, salt)
        if hold is None:
            return None
        kept = Kept(token_hex(16), hold, self._clock() + self._lease_s)
        self._kept[kept.lease_id] = kept
        most_slabs = MAX_KEPT_SHARE * self._cache.memory_use().num_slabs
        while self._kept_slabs() > most_slabs and (oldest := self._oldest()) is not None and oldest is not kept:
            self._end(oldest, GIVEN_UP)
        return kept

    def fence(self) -> None:
        """Fence what was kept since the last call, which nothing changes later. Between steps, without a plan open."""
        new = [kept for kept in self._kept.values() if not kept.is_fenced]
        if not new:
            return
        self._carry_out()
        fence = self._copies.fence()
        for kept in new:
            kept.fence, kept.is_fenced = fence, True

    def params(self, kept: Kept, host: str, port: int, engine_id: str) -> dict[str, object]:
        """Return what the request that continues a kept prompt is to carry."""
        params = TransferParams(
            is_remote_prefill=True,
            host=host,
            port=port,
            engine_id=engine_id,
            lease_id=kept.lease_id,
            num_tokens=len(kept.hold.tokens),
        )
        return params.as_json(expires_at=time.time() + self._lease_s)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now_s = self._clock()
        for kept in [kept for kept in self._kept.values() if kept.expires_s <= now_s and not kept.num_readers]:
            self._end(kept, EXPIRED)

    def give_up(self) -> bool:
        """End the oldest lease before its time; False: there is none that is not being read."""
        oldest = self._oldest()
        if oldest is None:
            return False
        self._end(oldest, GIVEN_UP)
        return True

    def drop(self, lease_id: str) -> None:
        """End a lease that was never announced to an engine, if it has not ended."""
        kept = self._kept.get(lease_id)
        if kept is not None:
            self._end(kept, GIVEN_UP)

    def offer(self, ask: Ask) -> tuple[Reading, Offer] | None:
        """Keep what is cached of a prompt until ``end``, and return its description; None: nothing is cached."""
        if not ask.tokens or len(ask.tokens) % TOKEN_BYTES:
            raise TransferError(Cause.GARBLED, f"{len(ask.tokens)} bytes of tokens")
        self.expire()
        tokens = TokenBuffer()
        tokens.data = bytearray(ask.tokens)
        kept = self._kept.get(ask.lease_id)
        if kept is not None and tokens.data.startswith(kept.hold.tokens.data):
            self.fence()
            kept.num_readers += 1
            reading = Reading(kept.hold, kept.fence, kept)
        else:
            hold = self._hold(tokens, ask.salt)
            if hold is None:
                return None
            self._carry_out()
            reading = Reading(hold, self._copies.fence(), None)
        snapshots = sorted((snapshot.position, str(snapshot.kind)) for snapshot in reading.hold.held or ())
        return reading, Offer(len(reading.hold.tokens), snapshots)

    def read(self, hold: Reading, items: Items) -> memoryview:
        """Read a piece of what is kept. Any thread may call it."""
        return self._copies.read(_entries(hold, items), hold.fence)

    def addresses(self, hold: Reading, items: Items) -> list[int]:
        """Return where each block and each slot of a piece lies, once it may be read. Any thread may call it."""
        return self._copies.addresses(_entries(hold, items), hold.fence)

    def end(self, hold: Reading, is_done: bool) -> None:
        """Release it now or, if not everything has arrived, when its lease expires."""
        kept = hold.kept
        if kept is None:
            self._holds.drop(hold.hold)
            return
        kept.num_readers -= 1
        kept.is_fetched |= is_done
        if kept.is_fetched and not kept.num_readers:
            self._end(kept, FETCHED)
        self.expire()

    def _hold(self, tokens: TokenBuffer, salt: str) -> Lease | None:
        self._num_holds += 1
        return self._holds.keep(RequestId(f"hold {self._num_holds}"), tokens, salt)

    def _oldest(self) -> Kept | None:
        """Return the oldest lease that is not being read."""
        return next((kept for kept in self._kept.values() if not kept.num_readers), None)

    def _end(self, kept: Kept, how: str) -> None:
        del self._kept[kept.lease_id]
        self._holds.drop(kept.hold)
        self.ended[how] += 1

    def _kept_slabs(self) -> float:
        """Return how much memory leases keep, counting what several share several times."""
        snapshots = [snapshot for kept in self._kept.values() for snapshot in kept.hold.held or ()]
        num_blocks = sum(len(kept.hold.table) for kept in self._kept.values())
        num_window_slabs = sum(
            len(window.held) / blocks_per_slab
            for snapshot in snapshots
            for window, blocks_per_slab in zip(snapshot.windows, self._window_blocks_per_slab, strict=True)
        )
        num_slots = sum(snapshot.num_slots for snapshot in snapshots)
        return num_blocks / self._blocks_per_slab + num_slots + num_window_slabs


def _entries(hold: Reading, items: Items) -> Entries:
    """Return what a piece holds."""
    blocks = list(hold.hold.table[items.start_block : items.end_block])
    held = {snapshot.position: snapshot for snapshot in hold.hold.held or ()}
    slots = [held[position].slot for position in items.positions]
    window = held[items.window_of].windows[items.lifetime - 1].held if items.num_window_blocks else ()
    return Entries(blocks, slots, of_lifetime(items.lifetime, window))
