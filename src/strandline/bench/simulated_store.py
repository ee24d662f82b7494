"""A store in simulated time: loads end one after the other, at the rate of a bus."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from strandline.cache import Action, Completion, LoadIn
from strandline.specs import ModelSpec

HOST_BYTES_PER_S: Final = 5.5e10
"""Pinned host memory to an H200, measured."""
LATENCY_S: Final = 2e-4
"""Of one load: to begin its copies, and to notice their end."""


class SimulatedStore:
    """Ends loads in the order in which they began. What is stored takes no time, as it does not hold up a load.

    Args:
        spec: of blocks and slots as they rest.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._loads: deque[tuple[float, Completion]] = deque()
        self.loaded_bytes = 0

    def begin(self, actions: Iterable[Action], now_s: float) -> None:
        """Begin the loads among some actions, behind those that are under way."""
        for action in actions:
            if isinstance(action, LoadIn):
                self._begin(action, now_s)

    def _begin(self, action: LoadIn, now_s: float) -> None:
        spec = self._spec
        num_bytes = len(action.blocks) * spec.block_bytes + len(action.slots) * spec.raw_slot_bytes
        self.loaded_bytes += num_bytes
        seconds = LATENCY_S + num_bytes / HOST_BYTES_PER_S
        begins_s = max(now_s, self._loads[-1][0]) if self._loads else now_s
        self._loads.append((begins_s + seconds, Completion(action.transfer, is_done=True, seconds=seconds)))

    @property
    def next_end_s(self) -> float:
        """When the next load ends; infinity when none is under way."""
        return self._loads[0][0] if self._loads else float("inf")

    def take_ended(self, now_s: float) -> list[Completion]:
        """Return the loads that have ended by now."""
        ended = []
        while self.next_end_s <= now_s:
            ended.append(self._loads.popleft()[1])
        return ended
