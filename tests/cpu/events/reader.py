"""Reads a cache's events as another process would, through the encoding of the wire."""

from collections.abc import Iterable

from strandline.cache import PrefixCache
from strandline.cache.announcing.announcer import take_events
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.events.wire import EventBatch, decode_batch, encode_batch
from strandline.records.cache_events import CacheEvent


class Reader:
    """Follows the events of one cache in this process."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.index = ResumableIndex()
        self.batches: list[EventBatch] = []

    def follow(self) -> None:
        """Apply what has happened since the last call."""
        events = take_events(self._cache)
        if events:
            self.batches.append(decode_batch(encode_batch(0.0, events)))
            apply_all(self.index, events)

    def hit(self, tokens: Iterable[int] | bytes | bytearray, salt: str = "") -> int:
        """Return the predicted hit of a prompt."""
        self.follow()
        return self.index.hit_tokens(PromptHashes(tokens, salt))


def apply_all(index: ResumableIndex, events: Iterable[CacheEvent]) -> None:
    """Apply events after a trip through their encoding."""
    for event in decode_batch(encode_batch(0.0, events)).events:
        index.apply(event)
