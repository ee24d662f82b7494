"""Tenants: the clients of one API key, their limits, and what they have used of these.

A limit per minute is a bucket that fills continuously: a tenant may use a minute's worth at once, and after that as
much as has flowed in since. Tokens are those of prompts that the cache does not hold, and of outputs. What a request
will generate is not known, so it is taken at the end, and the bucket may then be in debt.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2s
from typing import Final

from strandline.clock import SYSTEM_CLOCK, Clock
from strandline.errors import RequestError

MINUTE_S: Final = 60.0
SLOT_FREE_S: Final = 1.0
"""When a request may be sent again that was refused because others run; nothing says when those end."""


class RateLimitError(RequestError):
    """A tenant has reached one of its limits.

    Args:
        retry_after_s: when the request may be accepted.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of each key; None: no limit."""

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class _Bucket:
    """What a tenant may use at a rate.

    Args:
        per_minute: amount that flows in per minute; None: there is no limit.
    """

    def __init__(self, per_minute: int | None, clock: Clock) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._filled_s = clock()

    def wait_s(self, number: int) -> float:
        """Return how long it takes until a number can be taken; more than a minute's worth needs a full bucket."""
        if self._per_minute is None:
            return 0.0
        self._fill(self._per_minute)
        missing = min(number, self._per_minute) - self._level
        return max(missing * MINUTE_S / self._per_minute, 0.0)

    def take(self, number: int) -> None:
        """Take a number, also more than there is; a negative one is put back."""
        if self._per_minute is not None:
            self._fill(self._per_minute)
            self._level = min(self._level - number, self._per_minute)

    def _fill(self, per_minute: int) -> None:
        now_s = self._clock()
        self._level = min(self._level + (now_s - self._filled_s) * per_minute / MINUTE_S, per_minute)
        self._filled_s = now_s


class Tenant:
    """The clients of one API key.

    Args:
        id: different for every tenant of a server.
        name: in messages; empty: it has none.
        weight: its share of the engine while others wait, in proportion to theirs.
        has_peers: whether the server has other tenants.
    """

    def __init__(
        self,
        id: str = "",
        limits: KeyLimits | None = None,
        *,
        name: str = "",
        weight: float = 1.0,
        has_peers: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.id = id
        self.name = name
        self.weight = weight
        self.has_peers = has_peers
        self.limits = limits or KeyLimits()
        self._requests = _Bucket(self.limits.max_requests_per_minute, clock)
        self._tokens = _Bucket(self.limits.max_tokens_per_minute, clock)
        self._num_running = 0

    def begin_request(self) -> None:
        """Count a request that runs until ``end_request``.

        Raises:
            RateLimitError: too many run, or have come within a minute; this one is not counted.
        """
        most = self.limits.max_concurrent_requests
        if most is not None and self._num_running >= most:
            raise RateLimitError(
                f"{self._subject} has {self._num_running} unfinished requests; max-concurrent-requests is {most}",
                SLOT_FREE_S,
            )
        self._require(self._requests, 1, "max-requests-per-minute", self.limits.max_requests_per_minute)
        self._require(self._tokens, 0, "max-tokens-per-minute", self.limits.max_tokens_per_minute)
        self._requests.take(1)
        self._num_running += 1

    def end_request(self) -> None:
        """Count a request that has ended."""
        self._num_running -= 1

    def take_prompt(self, num_tokens: int) -> None:
        """Take a prompt's tokens.

        Raises:
            RateLimitError: there are not as many left.
        """
        self._require(self._tokens, num_tokens, "max-tokens-per-minute", self.limits.max_tokens_per_minute)
        self._tokens.take(num_tokens)

    def settle(self, num_output_tokens: int, num_hit: int) -> None:
        """Take the output of a request that has ended, and put back those tokens of its prompt that were hit."""
        self._tokens.take(num_output_tokens - num_hit)

    @property
    def _subject(self) -> str:
        if self.name:
            return f"the API key {self.name!r}"
        return "this API key" if self.id else "the server"

    def _require(self, bucket: _Bucket, number: int, name: str, limit: int | None) -> None:
        wait_s = bucket.wait_s(number)
        if wait_s > 0:
            raise RateLimitError(
                f"{self._subject} has used up its limit, {name} {limit}; try again in {wait_s:.1f} s", wait_s
            )


KEYLESS: Final = Tenant()
"""The tenant of servers without keys and limits."""
CURRENT_TENANT: Final[ContextVar[Tenant]] = ContextVar("tenant", default=KEYLESS)
"""The tenant whose HTTP request is being answered."""


def owner_digest(key: str) -> str:
    """Return the digest of a key that names its owner."""
    return blake2s(key.encode(), digest_size=16, person=b"owner").hexdigest()
