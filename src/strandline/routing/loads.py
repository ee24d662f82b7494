"""The work that each replica has been given and has not done, in tokens."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

FEW_REPLICAS: Final = 24
"""The replicas of a mask up to this size are visited one by one; one of a larger mask soon appears in order of load."""

SortKey = tuple[int, int, int, int]
"""Load, fill, time of the last reservation, and replica: what replicas are ordered by."""


@dataclass(slots=True)
class _Reservation:
    replica: int
    num_tokens: int


class Loads:
    """Reservations by request, and the replicas in order of their load.

    Of replicas with equal loads, the emptiest comes first, and of these the one that was chosen longest ago. All
    operations but iteration take a bisection.
    """

    def __init__(self) -> None:
        self._keys: dict[int, SortKey] = {}
        self._order: list[SortKey] = []
        self._num_requests: dict[int, int] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._time = 0

    def __len__(self) -> int:
        """Return the number of replicas."""
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """Yield the replicas, the least loaded first."""
        return (key[-1] for key in self._order)

    def load(self, replica: int) -> int:
        """Return the tokens reserved on a replica."""
        return self._keys[replica][0]

    def num_requests(self, replica: int) -> int:
        """Return the number of requests that a replica has."""
        return self._num_requests[replica]

    @property
    def least_requests(self) -> int:
        """Return how many requests the replica with the smallest load has."""
        return self._num_requests[self._order[0][-1]]

    @property
    def least_load(self) -> int:
        """Return the smallest load of all replicas."""
        return self._order[0][0]

    def add(self, replica: int) -> None:
        """Add a replica without load."""
        self._num_requests[replica] = 0
        self._put(replica, (0, 0, 0, replica))

    def remove(self, replica: int) -> list[str]:
        """Forget a replica; return its requests, which are forgotten too."""
        del self._order[bisect_left(self._order, self._keys.pop(replica))]
        del self._num_requests[replica]
        requests = [name for name, reserved in self._reservations.items() if reserved.replica == replica]
        for name in requests:
            del self._reservations[name]
        return requests

    def reserve(self, request_id: str, replica: int, num_tokens: int) -> None:
        """Count a request for a replica."""
        self._time += 1
        self._reservations[request_id] = _Reservation(replica, num_tokens)
        self._num_requests[replica] += 1
        self._move(replica, num_tokens, self._time)

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Count a request as at most this number of tokens from now on. Unknown requests are ignored."""
        reserved = self._reservations.get(request_id)
        if reserved is not None and num_tokens < reserved.num_tokens:
            self._move(reserved.replica, num_tokens - reserved.num_tokens)
            reserved.num_tokens = num_tokens

    def release(self, request_id: str) -> None:
        """Count a request no longer. Unknown requests are ignored."""
        reserved = self._reservations.pop(request_id, None)
        if reserved is not None:
            self._num_requests[reserved.replica] -= 1
            self._move(reserved.replica, -reserved.num_tokens)

    def fill(self, replica: int, amount: int) -> None:
        """Say how full a replica is, in any unit."""
        load, before, last, _ = self._keys[replica]
        if amount != before:
            self._replace(replica, (load, amount, last, replica))

    def least_of(self, mask: int) -> int:
        """Return the least loaded replica of a mask, which holds at least one and no unknown ones."""
        if mask.bit_count() > FEW_REPLICAS:
            return next(replica for replica in self if mask >> replica & 1)
        keys = []
        while mask:
            bit = mask & -mask
            mask ^= bit
            keys.append(self._keys[bit.bit_length() - 1])
        return min(keys)[-1]

    def _move(self, replica: int, more_tokens: int, time: int | None = None) -> None:
        load, fill, last, _ = self._keys[replica]
        self._replace(replica, (load + more_tokens, fill, last if time is None else time, replica))

    def _replace(self, replica: int, key: SortKey) -> None:
        del self._order[bisect_left(self._order, self._keys[replica])]
        self._put(replica, key)

    def _put(self, replica: int, key: SortKey) -> None:
        self._keys[replica] = key
        insort(self._order, key)
