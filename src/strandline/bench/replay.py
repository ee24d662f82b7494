"""Replays recorded traffic through the real cache and scheduler, with a cost model instead of the device.

Time is simulated: requests come when the trace says (and after the call before them in their lane has ended), run
together as the scheduler decides, and each step takes what the cost model says. Nothing is drawn at random, and no
clock is read but to time the router: the same trace, policy and budget give the same figures.

With several replicas, a router decides where each request runs. It learns of a step, and of the cache's events in it,
when the step has ended.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any, Final, assert_never

from strandline.bench.ideal import SeenPrefixes
from strandline.bench.replica import Machine, Replica, Running, Step
from strandline.bench.traces import Call, Lane
from strandline.cache import PrefixCache
from strandline.cache.announcing.announcer import take_events
from strandline.errors import EngineError
from strandline.events.resumable import PromptHashes
from strandline.events.wire import to_wire
from strandline.records.account import Reason
from strandline.records.actions import (
    CancelTransfer,
    CopyTokens,
    DropBlocks,
    DropSlot,
    DropStored,
    EnterFiles,
    FoldLog,
    LoadIn,
    MoveBlock,
    StoreOut,
)
from strandline.records.plan import StepPlan
from strandline.records.tokens import TOKEN_BYTES
from strandline.routing.router import Router

MOST_STEPS: Final = 32
"""Decode steps at a stretch where there are several replicas: any request that ends may send the next one here."""


@dataclass(slots=True)
class Result:
    """What a replay showed."""

    policy: str
    memory_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    num_requests: int = 0
    num_refused: int = 0
    """Longer than the memory holds: left out of all other figures."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0
    """Prompt tokens within the longest common prefix with anything sent or generated before."""
    prefilled_tokens: int = 0
    """Prompt tokens that were computed, those of preempted requests again."""
    missed_tokens: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    num_steps: int = 0
    num_preemptions: int = 0
    copied_tokens: int = 0
    moved_blocks: int = 0
    num_snapshots: int = 0
    num_loads: int = 0
    loaded_bytes: int = 0
    num_demoted: int = 0
    """Snapshots demoted to host memory."""
    num_spilled: int = 0
    """Snapshots passed on to the disk."""
    num_disk_loads: int = 0
    simulated_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    slot_bytes: int = 0
    """Held by slots at the end."""
    block_bytes: int = 0
    router: str = ""
    busy_s: list[float] = field(default_factory=list)
    """By replica: time in steps."""
    hashing_s: float = 0.0
    """Time that hashing prompts took, not simulated."""
    routing_s: float = 0.0
    """Time that the router took beyond that: choosing, and following events."""

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def ideal_share(self) -> float:
        return self.ideal_tokens / max(self.prompt_tokens, 1)

    @property
    def computed_per_request(self) -> float:
        """Prompt tokens computed, new ones included."""
        return self.prefilled_tokens / max(self.num_requests, 1)

    @property
    def recomputed_per_request(self) -> float:
        """Prompt tokens computed although they had been before."""
        new = self.prompt_tokens - self.ideal_tokens
        return (self.prefilled_tokens - new) / max(self.num_requests, 1)

    @property
    def num_replicas(self) -> int:
        return len(self.busy_s)

    @property
    def imbalance(self) -> float:
        """Time in steps of the busiest replica, as a multiple of the mean."""
        return max(self.busy_s) / max(fmean(self.busy_s), 1e-9)

    def ttft_quantile_s(self, share: float) -> float:
        """Return the time to the first token that ``share`` of the requests stay within."""
        ordered = sorted(self.ttft_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _next_s(events: Sequence[tuple[Any, ...]]) -> float:
    """Return when the first of some events happens."""
    return float(events[0][0]) if events else float("inf")


class Replay:
    """One trace under one policy, on one machine or on several equal ones.

    Args:
        emits_events: whether the caches collect events.
        router: where there are several replicas, decides which one gets a request.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(
        self,
        machine: Machine,
        policy_name: str,
        *,
        emits_events: bool = False,
        num_replicas: int = 1,
        router: Router | None = None,
    ) -> None:
        self.machine = machine
        self._router = router
        self._follows_events = router is not None and router.follows_events
        emits_events |= self._follows_events
        self.replicas = [Replica(machine, policy_name, emits_events=emits_events) for _ in range(num_replicas)]
        self._names = {str(index): index for index in range(num_replicas)}
        if router is not None:
            for name in self._names:
                router.add(name)
        sizes = machine.memory_bytes, machine.host_bytes, machine.disk_bytes
        self.result = Result(policy_name, *sizes, busy_s=[0.0] * num_replicas)
        self._seen = defaultdict[str, SeenPrefixes](SeenPrefixes)
        """By salt: prefixes are not shared across these."""
        self._lanes: list[tuple[float, Iterator[Call], str]] = []
        self._num_calls = 0
        self._arrivals: list[tuple[float, int, int, Call]] = []
        self._ends: list[tuple[float, int, Step]] = []
        """Steps that are running: when and where they end."""
        self._stepping: set[int] = set()
        """Replicas that run a step."""
        self._starts: list[tuple[float, int]] = []
        """Replicas that have requests and run no step, and since when."""

    @property
    def cache(self) -> PrefixCache:
        """Return the cache of the first replica."""
        return self.replicas[0].cache

    def run(self, lanes: Sequence[Lane], progress: Callable[[int], object] = lambda _: None) -> Result:
        """Replay the lanes to their end.

        Args:
            progress: called with 1 whenever a request has ended.
        """
        self._lanes = [(lane.start_s, lane.calls(), lane.adapter) for lane in lanes]
        for index, (start_s, _, _) in enumerate(self._lanes):
            self._call_next(index, start_s)
        while self._arrivals or self._ends or self._starts:
            # At the same time, a step ends, then requests arrive, then the next step starts.
            end_s, arrival_s, start_s = _next_s(self._ends), _next_s(self._arrivals), _next_s(self._starts)
            if end_s <= arrival_s and end_s <= start_s:
                self._end_step(progress)
            elif arrival_s <= start_s:
                self._receive()
            else:
                self._start_step()
        return self._finish()

    # Requests

    def _call_next(self, lane: int, ended_s: float) -> None:
        start_s, calls, _ = self._lanes[lane]
        for call in calls:
            most_bytes = self.replicas[0].most_tokens * TOKEN_BYTES
            if len(call.prompt) == 0 or len(call.prompt) + len(call.output) > most_bytes:
                self.result.num_refused += 1
                continue
            arrival_s = max(start_s + call.at_s, ended_s + call.think_s)
            self._num_calls += 1
            heapq.heappush(self._arrivals, (arrival_s, self._num_calls, lane, call))
            return

    def _receive(self) -> None:
        """Send the next request to a replica."""
        arrival_s, number, lane, call = heapq.heappop(self._arrivals)
        running = Running.of(str(number), call, lane, arrival_s, self._lanes[lane][2])
        self.result.num_requests += 1
        self.result.prompt_tokens += running.request.num_prompt_tokens
        self.result.ideal_tokens += self._seen[running.request.salt].add(call.prompt)
        index = self._route(running)
        replica = self.replicas[index]
        if not len(replica.scheduler) and index not in self._stepping:
            heapq.heappush(self._starts, (arrival_s, index))
        replica.add(running)

    def _route(self, running: Running) -> int:
        if self._router is None:
            return 0
        start_s = perf_counter()
        prompt = PromptHashes(running.call.prompt, running.request.salt)
        hashed_s = perf_counter()
        name = self._router.route(running.request.request_id, prompt)
        self.result.hashing_s += hashed_s - start_s
        self.result.routing_s += perf_counter() - hashed_s
        return self._names[name]

    # Steps

    def _start_step(self) -> None:
        now_s, index = heapq.heappop(self._starts)
        replica = self.replicas[index]
        replica.clock.now_s = now_s
        next_s = self._arrivals[0][0] if self._arrivals else float("inf")
        most_steps = None if len(self.replicas) == 1 else MOST_STEPS
        step = replica.step(next_s - now_s, most_steps, partial(self._count, replica))
        self._stepping.add(index)
        self.result.num_steps += step.num_steps
        heapq.heappush(self._ends, (replica.clock.now_s, index, step))

    def _end_step(self, progress: Callable[[int], object]) -> None:
        now_s, index, step = heapq.heappop(self._ends)
        self._stepping.discard(index)
        self._tell_router(index, step)
        for running in step.sampled:
            if not running.has_first:
                running.has_first = True
                self.result.ttft_s.append(now_s - running.arrival_s)
            if running.request.is_finished:
                self._end(running, now_s)
                progress(1)
        if len(self.replicas[index].scheduler):
            heapq.heappush(self._starts, (now_s, index))

    def _tell_router(self, index: int, step: Step) -> None:
        if self._router is None:
            return
        events = [to_wire(event) for event in take_events(self.replicas[index].cache)]
        start_s = perf_counter()
        self._router.apply(str(index), events)
        for running in step.sampled:
            if not running.has_first:
                self._router.begin(running.request.request_id)
            if running.request.is_finished:
                self._router.finish(running.request.request_id)
                self._router.forget(running.request.request_id)
        self.result.routing_s += perf_counter() - start_s

    def _count(self, replica: Replica, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            num_prompt = replica.running[sequence.request_id].request.num_prompt_tokens
            self.result.prefilled_tokens += max(min(sequence.end, num_prompt) - sequence.start, 0)
        for action in plan.actions:
            match action:
                case CopyTokens(_, _, num_tokens):
                    self.result.copied_tokens += num_tokens
                case MoveBlock():
                    self.result.moved_blocks += 1
                case DropBlocks() | DropSlot() | FoldLog() | LoadIn() | StoreOut() | DropStored():
                    pass
                case EnterFiles() | CancelTransfer():
                    pass
                case _:
                    assert_never(action)

    def _end(self, running: Running, now_s: float) -> None:
        request = running.request
        if request.account is None:
            raise EngineError(f"request {request.request_id} ended without an account")
        self.result.hit_tokens += request.account.hit
        for miss in request.account.misses:
            self.result.missed_tokens[miss.reason] += miss.num_tokens
        self._seen[request.salt].add(request.tokens.data)
        self._call_next(running.lane, now_s)

    def _finish(self) -> Result:
        result = self.result
        for index, replica in enumerate(self.replicas):
            stats, tiers = replica.cache.stats(), replica.scheduler.loading.loads.stats()
            result.simulated_s = max(result.simulated_s, replica.clock.now_s)
            result.busy_s[index] = replica.busy_s
            result.num_loads += stats.loads.num_done
            result.loaded_bytes += replica.store.loaded_bytes
            result.num_demoted += sum(tier.num_snapshots_demoted for tier in tiers[:1])
            result.num_spilled += sum(tier.num_snapshots_demoted for tier in tiers[1:])
            result.num_disk_loads += sum(tier.num_loads for tier in tiers[1:])
            result.num_preemptions += replica.scheduler.num_preemptions
            result.num_snapshots += sum(stats.snapshots_taken.values())
            result.slot_bytes += stats.memory.num_slots * self.machine.spec.slab_bytes
            result.block_bytes += stats.memory.num_blocks * self.machine.spec.block_bytes
        return result
