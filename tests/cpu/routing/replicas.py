"""Caches as replicas whose events reach a router through the encoding of the wire."""

from collections.abc import Iterable

from strandline.cache.announcing.announcer import take_events
from strandline.cache.evict_all import evict_all
from strandline.events.resumable import PromptHashes
from strandline.events.wire import WireEvent, decode_batch, encode_batch
from strandline.records.cache_events import CacheEvent
from strandline.routing.router import Router
from tests.cpu.cache.driver import Driver


def on_the_wire(events: Iterable[CacheEvent]) -> list[WireEvent]:
    """Return events as a subscriber gets them."""
    return decode_batch(encode_batch(0.0, events)).events


class Fleet:
    """Replicas with a cache each, and a router that knows them as ``a``, ``b``, …"""

    def __init__(self, router: Router, num_replicas: int = 3, *, lower_blocks: int = 0) -> None:
        self.router = router
        names = [chr(ord("a") + index) for index in range(num_replicas)]
        self.drivers = {name: Driver(emits_events=True, lower_blocks=(lower_blocks,)) for name in names}
        for name in self.drivers:
            router.add(name)
        self._num_requests = 0

    def serve(self, name: str, tokens: Iterable[int]) -> None:
        """Let a replica serve a prompt, and tell the router."""
        driver = self.drivers[name]
        driver.serve(tokens)
        self.router.apply(name, on_the_wire(take_events(driver.cache)))

    def evict_all(self, name: str) -> None:
        """Let a replica's device evict everything, and tell the router."""
        driver = self.drivers[name]
        evict_all(driver.cache)
        driver.flush()
        self.router.apply(name, on_the_wire(take_events(driver.cache)))

    def end(self, request_id: str) -> None:
        """Let a request end, and its events have come."""
        self.router.finish(request_id)
        self.router.forget(request_id)

    def route(self, tokens: Iterable[int], request_id: str = "") -> str:
        """Return where the router sends a prompt."""
        self._num_requests += 1
        return self.router.route(request_id or f"request {self._num_requests}", PromptHashes(tokens))
