"""A log of the last lookups, to explain their misses later. Bounded in number and in bytes."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from strandline.ids import RequestId
from strandline.records.account import Account

MAX_LOOKUPS: Final = 256
MAX_PROMPT_BYTES: Final = 32 * 2**20
"""Bytes of all stored prompts together; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one request found when it was admitted."""

    request_id: RequestId
    salt: str
    at_s: float
    account: Account


class LookupLog:
    """The last lookups, and the prompts of the newest ones."""

    def __init__(self, max_lookups: int = MAX_LOOKUPS, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> None:
        self._max_lookups = max_lookups
        self._max_prompt_bytes = max_prompt_bytes
        self._lookups: deque[tuple[Lookup, bytes]] = deque()
        self._num_prompts = 0
        """How many of the newest lookups still have their prompt."""
        self._prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._lookups)

    def __iter__(self) -> Iterator[tuple[Lookup, bytes | None]]:
        """Yield the lookups, newest first, each with its encoded prompt if that is still kept."""
        for age, (lookup, prompt) in enumerate(reversed(self._lookups)):
            yield lookup, prompt if age < self._num_prompts else None

    def record(self, lookup: Lookup, prompt: bytes) -> None:
        """Add a lookup.

        Args:
            prompt: its tokens, encoded.
        """
        self._lookups.append((lookup, prompt))
        self._num_prompts += 1
        self._prompt_bytes += len(prompt)
        if len(self._lookups) > self._max_lookups:
            _, oldest = self._lookups.popleft()
            self._num_prompts = min(self._num_prompts, len(self._lookups))
            self._prompt_bytes -= len(oldest)
        while self._prompt_bytes > self._max_prompt_bytes and self._num_prompts:
            index = len(self._lookups) - self._num_prompts
            kept, oldest = self._lookups[index]
            self._lookups[index] = (kept, b"")
            self._prompt_bytes -= len(oldest)
            self._num_prompts -= 1

    def find(self, name: str) -> tuple[Lookup, bytes | None] | None:
        """Return the newest lookup of a request, and its encoded prompt if that is still kept.

        Args:
            name: the id of the request, or of the answer that it belongs to, which is a prefix of the request's id.
        """
        parts = (f"{name}-", f"{name}#")
        return next((kept for kept in self if kept[0].request_id == name or kept[0].request_id.startswith(parts)), None)
