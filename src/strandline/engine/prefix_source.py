"""What this engine keeps for others and gives to them: the prompts of requests that others continue, and its cache.

A prompt is kept under a lease until it has been fetched, its time is over, or its memory is needed for requests that
could not run otherwise. What is being fetched is kept until that has ended. Without a lease, or after one, whatever is
cached of a prompt is offered.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from strandline.cache import Lease, PrefixCache, TokenBuffer
from strandline.cache.holds import slots_at
from strandline.cache.tokens import TOKEN_BYTES
from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.device.arena_copies import ArenaCopies, Fence
from strandline.ids import RequestId
from strandline.records.transfer_params import TransferParams
from strandline.transfer.connection import Cause, TransferError
from strandline.transfer.layout import Items
from strandline.transfer.messages import Ask, Offer

MAX_KEPT_SHARE: Final = 0.5
"""Of the memory, for leases; the oldest are given up for new ones."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A prompt that is kept for the engine that continues it."""

    lease_id: str
    hold: Lease
    expires_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A prefix that another engine fetches, or decides about."""

    hold: Lease
    fence: Fence
    kept: Kept | None
    """The lease that it is fetched under."""


class PrefixSource:
    """The source of a ``PullServer``. All methods but ``read`` belong to the engine's thread.

    Args:
        carry_out: carries out the cache's actions, so that what is kept lies where the cache says.
        lease_s: how long a prompt is kept.
    """

    def __init__(
        self,
        cache: PrefixCache,
        copies: ArenaCopies,
        carry_out: Callable[[], None],
        *,
        blocks_per_slab: int,
        lease_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._cache = cache
        self._copies = copies
        self._carry_out = carry_out
        self._blocks_per_slab = blocks_per_slab
        self._lease_s = lease_s
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        """By lease id; the oldest first."""
        self._num_holds = 0

    def keep(self, tokens: TokenBuffer, salt: str) -> Kept | None:
        """Keep the prefix of a request that has ended; None: there is nothing of it, or no memory."""
        hold = self._hold(tokens, salt)
        if hold is None:
            return None
        kept = Kept(token_hex(16), hold, self._clock() + self._lease_s)
        self._kept[kept.lease_id] = kept
        while len(self._kept) > 1 and self._kept_slabs() > MAX_KEPT_SHARE * self._cache.memory_use().num_slabs:
            self.give_up()
        return kept

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
        for kept in [kept for kept in self._kept.values() if kept.expires_s <= now_s]:
            self._drop(kept)

    def give_up(self) -> bool:
        """End the oldest lease before its time; False: there is none."""
        if not self._kept:
            return False
        self._drop(next(iter(self._kept.values())))
        return True

    def offer(self, ask: Ask) -> tuple[Reading, Offer] | None:
        """Keep what there is of a prompt until ``end``, and say what that is; None: nothing."""
        if not ask.tokens or len(ask.tokens) % TOKEN_BYTES:
            raise TransferError(Cause.GARBLED, f"{len(ask.tokens)} bytes of tokens")
        self.expire()
        tokens = TokenBuffer()
        tokens.data = bytearray(ask.tokens)
        kept = self._kept.get(ask.lease_id)
        if kept is not None and tokens.data.startswith(kept.hold.tokens.data):
            del self._kept[ask.lease_id]
            hold: Lease | None = kept.hold
        else:
            kept, hold = None, self._hold(tokens, ask.salt)
        if hold is None:
            return None
        self._carry_out()
        snapshots = sorted((snapshot.position, str(snapshot.kind)) for snapshot in hold.held or ())
        return Reading(hold, self._copies.fence(), kept), Offer(len(hold.tokens), snapshots)

    def read(self, hold: Reading, items: Items) -> memoryview:
        """Read a piece of what is kept. Any thread may call it."""
        blocks = hold.hold.table[items.start_block : items.end_block]
        return self._copies.read(blocks, slots_at(hold.hold, items.positions), hold.fence)

    def end(self, hold: Reading, is_done: bool) -> None:
        """Keep it no longer, or, if not everything has arrived, as long as its lease says."""
        if hold.kept is not None and not is_done:
            self._kept[hold.kept.lease_id] = hold.kept
            self.expire()
        else:
            self._cache.holds.drop(hold.hold)

    def _hold(self, tokens: TokenBuffer, salt: str) -> Lease | None:
        self._num_holds += 1
        return self._cache.holds.keep(RequestId(f"hold {self._num_holds}"), tokens, salt)

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.lease_id]
        self._cache.holds.drop(kept.hold)

    def _kept_slabs(self) -> float:
        """Return how much memory leases keep, counting what several share several times."""
        size = self._blocks_per_slab
        return sum(len(kept.hold.table) / size + len(kept.hold.held or ()) for kept in self._kept.values())
