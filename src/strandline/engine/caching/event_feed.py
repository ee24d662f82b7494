"""Hands the cache's events to their publisher, and to the router of the server's engines, after each step."""

from collections.abc import Sequence

from strandline.cache import PrefixCache
from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.events.publisher import EventPublisher
from strandline.kv_events_config import KVEventsConfig
from strandline.records.cache_events import CacheEvent
from strandline.records.messages import EventEndpoints


class EventFeed:
    """The events of one cache on their way to those who follow them.

    When the publisher has dropped events because its queue was full, subscribers are wrong until everything is stated
    anew, which happens as soon as half of the queue is free.

    Args:
        config: how they are published; None: they are not.
        rank: the number of the engine among those of its server.
        is_kept: whether events are kept until ``take``.

    Raises:
        ConfigError: an endpoint is wrong or taken.
    """

    def __init__(
        self, cache: PrefixCache, config: KVEventsConfig | None, rank: int = 0, *, is_kept: bool = False
    ) -> None:
        self._cache = cache
        self.publisher = None if config is None else EventPublisher(config, rank)
        self._kept: list[CacheEvent] | None = [] if is_kept else None
        self._is_restating = False
        """Whether the next events must state everything anew."""

    def flush(self) -> None:
        """Queue what has happened since the last call."""
        publisher = self.publisher
        if publisher is not None:
            self._is_restating |= publisher.take_restate_request()
        if self._is_restating and publisher is not None and not publisher.is_behind:
            events, self._is_restating = restate_events(self._cache), False
        else:
            events = take_events(self._cache)
        if events and self._kept is not None:
            self._kept += events
        if events and publisher is not None:
            self._is_restating |= not publisher.publish(events)

    def take(self) -> Sequence[CacheEvent]:
        """Return the events that have been kept since the last call."""
        taken: Sequence[CacheEvent] = self._kept or ()
        if taken:
            self._kept = []
        return taken

    @property
    def endpoints(self) -> EventEndpoints | None:
        """Where events are published; None: nowhere."""
        publisher = self.publisher
        return None if publisher is None else EventEndpoints(publisher.endpoint, publisher.replay_endpoint)

    @property
    def num_published(self) -> int:
        """Events sent to subscribers."""
        return 0 if self.publisher is None else self.publisher.num_published

    @property
    def num_dropped(self) -> int:
        """Events that found the publisher's queue full."""
        return 0 if self.publisher is None else self.publisher.num_dropped

    def describe(self) -> list[str]:
        """Return a line with the addresses of the events, if they are published."""
        if self.publisher is None:
            return []
        replay = self.publisher.replay_endpoint
        where = "no replays" if replay is None else f"replays on {replay}"
        return [f"cache events: published on {self.publisher.endpoint}, {where}"]

    def close(self) -> None:
        """Send what is queued and stop."""
        if self.publisher is not None:
            self.publisher.close()
