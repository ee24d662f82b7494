"""What routers have in common: they choose a replica for each request, and are notified of changes to both."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from strandline.errors import EngineError
from strandline.events.resumable import PromptHashes
from strandline.events.wire import WireEvent


class NoReplicaError(EngineError):
    """There is no replica to send a request to."""


class Router(Protocol):
    """Chooses replicas. Not thread-safe."""

    follows_events: bool
    """Whether ``apply`` has an effect."""

    def add(self, replica: str) -> None:
        """Add a replica, whose cache is empty until its events say otherwise."""

    def remove(self, replica: str) -> list[str]:
        """Forget a replica; return its unfinished requests, which are forgotten too. Unknown replicas are ignored."""

    def apply(self, replica: str, events: Iterable[WireEvent]) -> None:
        """Record events of a replica's cache. Those of unknown replicas are ignored."""

    def clear(self, replica: str) -> None:
        """Forget what a replica's events have said: some of them were missed."""

    def route(self, request_id: str, prompt: PromptHashes) -> str:
        """Return the replica for a request, and count the request as unfinished there.

        Raises:
            NoReplicaError: no replica was added.
        """

    def begin(self, request_id: str) -> None:
        """Record that a request's first token was sampled. Unknown requests are ignored."""

    def finish(self, request_id: str) -> None:
        """Record that a request has ended. Unknown requests are ignored."""

    def forget(self, request_id: str) -> None:
        """Leave it to events what a request that has ended left in a cache. Unknown requests are ignored."""

    def in_order(self) -> Iterator[str]:
        """Yield the replicas, the least loaded first."""


class Names:
    """The names of replicas and their numbers. Numbers are small, and those of removed replicas are used again."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._names)

    def add(self, name: str) -> int | None:
        """Return the number of a new name; None: it is known already."""
        if name in self._numbers:
            return None
        number = next(number for number in range(len(self._names) + 1) if number not in self._names)
        self._numbers[name], self._names[number] = number, name
        return number

    def remove(self, name: str) -> int | None:
        """Forget a name; return its number, or None if it is unknown."""
        number = self._numbers.pop(name, None)
        if number is not None:
            del self._names[number]
        return number

    def number(self, name: str) -> int | None:
        """Return the number of a name; None: it is unknown."""
        return self._numbers.get(name)

    def name(self, number: int) -> str:
        """Return the name of a number."""
        return self._names[number]
