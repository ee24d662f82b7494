"""Chooses one of the server's engines for each prompt, by what they can resume and what they have to do.

What an engine can resume comes with its other messages, before the step that changed it: no event is missed.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from strandline.events.resumable import PromptHashes
from strandline.events.wire import decode_batch
from strandline.routing.snapshot_router import SnapshotRouter

FORGET_AFTER_S: Final = 1.0
"""How long the prompt of an aborted request counts as cached: until the engine has ended it, and said what is left."""


class EngineRouter:
    """Reserves tokens with the choice, so that a burst is spread before an engine has received it.

    Args:
        engines: numbers of those that run.
        has_cache: whether they keep prefixes. If not, equal prompts are computed by each of their requests.
    """

    def __init__(self, engines: Iterable[int], *, has_cache: bool = True) -> None:
        self._router = SnapshotRouter()
        self._has_cache = has_cache
        for engine in engines:
            self.add(engine)

    def add(self, engine: int) -> None:
        """Add an engine whose cache is empty until its events say otherwise."""
        self._router.add(str(engine))

    def remove(self, engine: int) -> None:
        """Forget an engine that has exited, and its requests."""
        self._router.remove(str(engine))

    def apply(self, engine: int, batch: bytes) -> None:
        """Record events of an engine's cache."""
        self._router.apply(str(engine), decode_batch(batch).events)

    def route(self, request_id: str, tokens: Iterable[int], salt: str, hung: Iterable[int] = ()) -> int:
        """Return the engine for a prompt, and reserve its tokens there.

        Args:
            hung: engines that do not respond: they get it only if no other runs.

        Raises:
            NoReplicaError: there is none.
        """
        if not self._has_cache:
            salt = request_id  # nothing is in common with other prompts
        return int(self._router.route(request_id, PromptHashes(tokens, salt), map(str, hung)))

    def begin(self, request_id: str) -> None:
        """Record that a request's first token was sampled."""
        self._router.begin(request_id)

    def finish(self, request_id: str) -> None:
        """Record that a request has ended. Unknown ones are ignored."""
        self._router.finish(request_id)
        asyncio.get_running_loop().call_later(FORGET_AFTER_S, self._router.forget, request_id)
