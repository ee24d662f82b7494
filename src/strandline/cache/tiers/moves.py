"""Moves: what is on its way from one memory to another, by one transfer or several.

| move | source | target |
| --- | --- | --- |
| demotion | the device, which evicts it (``DeviceEntry``) | the first tier |
| load | a tier (``RetainedCopy``, ``ExchangedCopy``) or another store | the device (``DeviceTarget``) |
| spill | a tier (``SpilledCopy``) | the next tier (``TierTarget``) |
| flush | the device, which retains it, or the first tier | the second tier |
| adoption | files of an earlier process | the tier that wrote them |

A move begins when its source is pinned and its target has memory. It ends when all of its transfers have: it is *done*
if all are done, else it has *failed*, as a transfer failed or was cancelled. The target ends first: it makes all of
what has arrived available or, after a failure, frees its memory. Then the source lets go of what was read.

Demotions and adoptions are done as soon as they begin: a load that follows reads what a demotion has stored
(``StoreOut``), and what is adopted is there already.

Invariants: what a transfer writes is neither freed nor used otherwise before the move's end, also if the request that
it was begun for has ended, and nor is what it reads, unless it is exchanged (``tier_sources.py``); nothing that moves
can be read in its target before the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from strandline.errors import CacheInvariantError
from strandline.ids import TransferId
from strandline.records.actions import Action, Completion


class MoveEnd(Protocol):
    """A source or a target."""

    def end(self, completion: Completion) -> None:
        """Handle the end of the move.

        Args:
            completion: the common end of all its transfers.
        """


Target_t = TypeVar("Target_t", bound=MoveEnd, covariant=True)


@dataclass(slots=True, eq=False)
class Move(Generic[Target_t]):
    """A move under way."""

    source: MoveEnd | None
    """None: nothing has to be pinned."""
    target: Target_t
    transfers: set[TransferId] = field(default_factory=set)
    """Those that have not ended."""
    ended: list[Completion] = field(default_factory=list)

    @property
    def completion(self) -> Completion:
        """The end of all transfers, as that of one."""
        seconds = [each.seconds for each in self.ended]
        causes = [each.cause for each in self.ended if each.cause]
        return Completion(
            self.ended[0].transfer,
            is_done=all(each.is_done for each in self.ended),
            seconds=sum(seconds) if all(seconds) else 0.0,
            lost=tuple(address for each in self.ended for address in each.lost),
            cause=causes[-1] if causes else "",
            max_free_bytes=min((x.max_free_bytes for x in self.ended if x.max_free_bytes is not None), default=None),
        )


class Moves:
    """The moves under way of a cache.

    Args:
        issue: takes actions.
    """

    def __init__(self, issue: Callable[[Action], None]) -> None:
        self.issue = issue
        self.next_number = 1
        """That of the next transfer."""
        self._move_of: dict[TransferId, Move[MoveEnd]] = {}
        """By transfer under way."""

    def next_transfer(self) -> TransferId:
        """Return a number for a transfer, of any kind."""
        self.next_number += 1
        return TransferId(self.next_number - 1)

    def begin(self, move: Move[MoveEnd], transfer: TransferId) -> None:
        """Record that a transfer begins, the first one of a move or a further one."""
        move.transfers.add(transfer)
        self._move_of[transfer] = move

    def __iter__(self) -> Iterator[Move[MoveEnd]]:
        """Yield the moves under way."""
        return iter(dict.fromkeys(self._move_of.values()))

    def find(self, transfer: TransferId) -> Move[MoveEnd] | None:
        """Return the move that a transfer belongs to; None: it has ended, or nothing waits for it."""
        return self._move_of.get(transfer)

    def complete(self, completion: Completion) -> Move[MoveEnd] | None:
        """Handle the end of a transfer; return the move that has ended with it, if one has.

        Raises:
            CacheInvariantError: no such transfer was begun.
        """
        if not 0 < completion.transfer < self.next_number:
            raise CacheInvariantError(f"transfer {completion.transfer} ended but had not begun")
        move = self._move_of.pop(completion.transfer, None)
        if move is None:
            return None
        move.transfers.remove(completion.transfer)
        move.ended.append(completion)
        if move.transfers:
            return None
        move.target.end(move.completion)
        if move.source is not None:
            move.source.end(move.completion)
        return move
