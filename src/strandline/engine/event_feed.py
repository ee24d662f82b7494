"""Hands the cache's events to their publisher after each step."""

from strandline.cache import PrefixCache
from strandline.events.publisher import EventPublisher
from strandline.kv_events_config import KVEventsConfig


class EventFeed:
    """The events of one cache on their way to the publisher's queue.

    When events were dropped because the queue was full, subscribers are wrong until everything is stated anew, which
    happens as soon as half of the queue is free.

    Raises:
        ConfigError: an endpoint is wrong or taken.
    """

    def __init__(self, cache: PrefixCache, config: KVEventsConfig) -> None:
        self._cache = cache
        self._publisher = EventPublisher(config)
        self._is_restating = False
        """Whether the next events must state everything anew."""

    @property
    def publisher(self) -> EventPublisher:
        return self._publisher

    def flush(self) -> None:
        """Queue what has happened since the last call."""
        self._is_restating |= self._publisher.take_restate_request()
        if self._is_restating and not self._publisher.is_behind:
            self._is_restating = not self._publisher.publish(self._cache.restate_events())
        elif events := self._cache.take_events():
            self._is_restating |= not self._publisher.publish(events)

    def describe(self) -> str:
        """Return in a line where the events are."""
        replay = self._publisher.replay_endpoint
        where = "no replays" if replay is None else f"replays on {replay}"
        return f"cache events: published on {self._publisher.endpoint}, {where}"

    def close(self) -> None:
        """Send what is queued and stop."""
        self._publisher.close()
