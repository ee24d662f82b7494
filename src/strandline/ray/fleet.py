"""One process's view of the replicas: a router, and for each replica a thread that follows its events.

The request router, which Ray runs in a separate thread, and the ingress share one fleet per deployment.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from typing import Final

from strandline.events.resumable import PromptHashes
from strandline.events.subscriber import Subscriber
from strandline.events.wire import WireEvent
from strandline.records.messages import EventEndpoints
from strandline.routing.names import make_router
from strandline.routing.router import Router

POLL_S: Final = 0.5
"""Longest time for a thread to detect that its replica is gone."""
CATCH_UP_INTERVAL_S: Final = 5.0
EVENT_DELAY_S: Final = 1.0
"""Longest delay of an event from a busy engine; the next turn may arrive sooner."""


class Fleet:
    """A router that several threads may use."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = Lock()
        self._replicas: dict[str, EventEndpoints | None] = {}
        self._followers: dict[str, Follower] = {}
        self._ended: deque[tuple[float, str]] = deque()
        """Ended requests, and the time when their events have certainly arrived."""

    def set_replicas(self, replicas: Mapping[str, EventEndpoints | None]) -> None:
        """Add new replicas, remove those that are gone, and follow the events of those with endpoints."""
        with self._lock:
            for name in self._replicas.keys() - replicas.keys():
                self._drop(name)
            for name, endpoints in replicas.items():
                if name not in self._replicas:
                    self._router.add(name)
                self._replicas[name] = endpoints
                if endpoints is not None and name not in self._followers and self._router.follows_events:
                    self._followers[name] = Follower(self, name, endpoints)

    def remove(self, name: str) -> None:
        """Remove a failed replica. Unknown ones are ignored."""
        with self._lock:
            if name in self._replicas:
                self._drop(name)

    def route(self, request_id: str, prompt: PromptHashes) -> list[str]:
        """Return all replicas, starting with the one chosen for a request. An earlier choice is dropped.

        Raises:
            NoReplicaError: there is none.
        """
        with self._lock:
            self._forget_old()
            self._router.finish(request_id)
            self._router.forget(request_id)
            chosen = self._router.route(request_id, prompt)
            return [chosen, *(name for name in self._router.in_order() if name != chosen)]

    def begin(self, request_id: str) -> None:
        """Record that a request's first token was sampled."""
        with self._lock:
            self._router.begin(request_id)

    def finish(self, request_id: str) -> None:
        """Record that a request has ended. Its events may still be in transit."""
        with self._lock:
            self._router.finish(request_id)
            self._ended.append((monotonic() + EVENT_DELAY_S, request_id))

    def apply(self, name: str, event: WireEvent) -> None:
        """Record an event of a replica's cache."""
        with self._lock:
            self._router.apply(name, (event,))

    def clear(self, name: str) -> None:
        """Clear the state built from a replica's events."""
        with self._lock:
            self._router.clear(name)

    def close(self) -> None:
        """Stop all threads."""
        self.set_replicas({})

    def _forget_old(self) -> None:
        now_s = monotonic()
        while self._ended and self._ended[0][0] <= now_s:
            self._router.forget(self._ended.popleft()[1])

    def _drop(self, name: str) -> None:
        del self._replicas[name]
        self._router.remove(name)
        follower = self._followers.pop(name, None)
        if follower is not None:
            follower.stop()


@dataclass(frozen=True, slots=True)
class ReplicaSink:
    """Passes the events of one replica on to its fleet."""

    fleet: Fleet
    name: str

    def apply(self, event: WireEvent) -> None:
        """Record an event."""
        self.fleet.apply(self.name, event)

    def clear(self) -> None:
        """Clear the state built from the replica's events."""
        self.fleet.clear(self.name)


class Follower:
    """A thread that follows one replica's events."""

    def __init__(self, fleet: Fleet, name: str, endpoints: EventEndpoints) -> None:
        self._sink = ReplicaSink(fleet, name)
        self._endpoints = endpoints
        self._is_stopped = Event()
        Thread(target=self._run, name=f"events of {name}", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end soon."""
        self._is_stopped.set()

    def _run(self) -> None:
        with Subscriber(self._endpoints.live, self._endpoints.replay, sink=self._sink) as subscriber:
            next_s = 0.0
            while not self._is_stopped.is_set():
                if monotonic() >= next_s:
                    subscriber.catch_up()
                    next_s = monotonic() + CATCH_UP_INTERVAL_S
                subscriber.follow(POLL_S)


_FLEETS: Final[dict[str, Fleet]] = {}
_FLEETS_LOCK: Final = Lock()


def fleet_named(name: str, router: str) -> Fleet:
    """Return this process's fleet of that name, with a router by name if it is new.

    Raises:
        ConfigError: there is no router of that name.
    """
    with _FLEETS_LOCK:
        if name not in _FLEETS:
            _FLEETS[name] = Fleet(make_router(router))
        return _FLEETS[name]
