"""Routers that know nothing of what is cached, to compare with."""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Final, Protocol

from strandline.events.resumable import PromptHashes
from strandline.events.wire import WireEvent
from strandline.ids import BLOCK_TOKENS
from strandline.routing.loads import Loads
from strandline.routing.router import Names, NoReplicaError

LEAST_MATCH: Final = 0.1
"""Share of a prompt that must match for ``LongestMatch`` to send it there."""


class Rule(Protocol):
    """Chooses one of some replicas."""

    def choose(self, replicas: Sequence[int], loads: Loads, prompt: PromptHashes) -> int:
        """Return one of the replicas. There is at least one; they are in the order of their numbers."""

    def forget(self, replica: int) -> None:
        """Forget a replica, whose number may be that of another one later."""


class BlindRouter:
    """Ignores events, and counts each request as a load of one."""

    follows_events = False

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._names = Names()
        self._loads = Loads()

    def add(self, replica: str) -> None:
        """Add a replica."""
        number = self._names.add(replica)
        if number is not None:
            self._loads.add(number)

    def remove(self, replica: str) -> list[str]:
        """Forget a replica; return its unfinished requests, which are forgotten too. Unknown replicas are ignored."""
        number = self._names.remove(replica)
        if number is None:
            return []
        self._rule.forget(number)
        return self._loads.remove(number)

    def apply(self, replica: str, events: Iterable[WireEvent]) -> None:
        """Do nothing."""

    def clear(self, replica: str) -> None:
        """Do nothing."""

    def route(self, request_id: str, prompt: PromptHashes) -> str:
        """Return the replica that the rule chooses, and count the request there.

        Raises:
            NoReplicaError: no replica was added.
        """
        replicas = sorted(self._names)
        if not replicas:
            raise NoReplicaError("there is no replica")
        number = self._rule.choose(replicas, self._loads, prompt)
        self._loads.reserve(request_id, number, 1)
        return self._names.name(number)

    def begin(self, request_id: str) -> None:
        """Do nothing."""

    def finish(self, request_id: str) -> None:
        """Record that a request has ended. Unknown requests are ignored."""
        self._loads.release(request_id)

    def forget(self, request_id: str) -> None:
        """Do nothing."""

    def in_order(self) -> Iterator[str]:
        """Yield the replicas, the one with the fewest requests first."""
        return map(self._names.name, self._loads)


class AnyReplica:
    """Chooses any replica."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, replicas: Sequence[int], loads: Loads, prompt: PromptHashes) -> int:
        """Return any replica."""
        return self._random.choice(replicas)

    def forget(self, replica: int) -> None:
        """Do nothing."""


class NextReplica:
    """Chooses one replica after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, replicas: Sequence[int], loads: Loads, prompt: PromptHashes) -> int:
        """Return the replica after the last one."""
        self._last = next((replica for replica in replicas if replica > self._last), replicas[0])
        return self._last

    def forget(self, replica: int) -> None:
        """Do nothing."""


class FewerOfTwo:
    """Chooses the one of two random replicas that has fewer requests: the default of Ray Serve."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, replicas: Sequence[int], loads: Loads, prompt: PromptHashes) -> int:
        """Return the less loaded one of two replicas."""
        return min(self._random.sample(replicas, min(2, len(replicas))), key=loads.num_requests)

    def forget(self, replica: int) -> None:
        """Do nothing."""


class LongestMatch:
    """Chooses the replica where most of a prompt was sent before, whether it is cached there or not.

    A prompt that matches less than ``LEAST_MATCH`` goes where the fewest different blocks were sent. The rules are
    those of Ray Serve's ``PrefixCacheAffinityRouter``, over blocks of tokens where that has characters. Nothing is
    forgotten, as by default there.
    """

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        """By block: the mask of the replicas that it was sent to."""
        self._num_sent: dict[int, int] = {}
        """By replica: the number of different blocks."""

    def choose(self, replicas: Sequence[int], loads: Loads, prompt: PromptHashes) -> int:
        """Return the replica with the longest match, and note that the prompt is sent there."""
        num_matched, mask = 0, 0
        for block in prompt.blocks:
            found = self._sent.get(block, 0)
            if not found:
                break
            num_matched, mask = num_matched + 1, found
        if mask and num_matched * BLOCK_TOKENS >= LEAST_MATCH * prompt.num_tokens:
            chosen = loads.least_of(mask)
        else:
            chosen = min(replicas, key=lambda replica: self._num_sent.get(replica, 0))
        for block in prompt.blocks:
            before = self._sent.get(block, 0)
            if not before >> chosen & 1:
                self._sent[block] = before | 1 << chosen
                self._num_sent[chosen] = self._num_sent.get(chosen, 0) + 1
        return chosen

    def forget(self, replica: int) -> None:
        """Forget what was sent to a replica."""
        self._num_sent.pop(replica, None)
        self._sent = {block: left for block, mask in self._sent.items() if (left := mask & ~(1 << replica))}
