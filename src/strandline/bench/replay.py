"""Replays recorded traffic through the real cache and scheduler, with a cost model in place of the device.

Time is simulated: requests come when the trace says (and after the call before them in their lane has ended), run
together as the scheduler decides, and each step takes what the cost model says. While no sequence prefills, all decode
several tokens at a stretch, up to the next arrival or end. Nothing is drawn at random and no clock is read: the same
trace, policy and budget give the same figures.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from strandline.bench.cost import CostModel
from strandline.bench.ideal import SeenPrefixes
from strandline.bench.policies import make_cache, policy
from strandline.bench.traces import Call, Lane
from strandline.cache import (
    CancelTransfer,
    CopyTokens,
    DropBlocks,
    DropSlot,
    FoldLog,
    LoadIn,
    MoveBlock,
    Reason,
    StoreOut,
    resume_rule,
)
from strandline.cache.tokens import TOKEN_BYTES, decode
from strandline.engine.request import Request
from strandline.engine.scheduler import Scheduler
from strandline.errors import EngineError
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams
from strandline.specs import ModelSpec

NOTHING = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the trace is replayed on."""

    spec: ModelSpec
    cost: CostModel
    memory_bytes: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(slots=True)
class Result:
    """What a replay showed."""

    policy: str
    memory_bytes: int
    num_requests: int = 0
    num_refused: int = 0
    """Longer than the memory holds: left out of all other figures."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0
    """Of prompts: the longest common prefix with anything sent or generated before."""
    prefilled_tokens: int = 0
    """Prompt tokens that were computed, those of preempted requests again."""
    missed_tokens: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    num_steps: int = 0
    num_preemptions: int = 0
    copied_tokens: int = 0
    moved_blocks: int = 0
    num_snapshots: int = 0
    simulated_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    slot_bytes: int = 0
    """Held by slots at the end."""
    block_bytes: int = 0

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

    def ttft_quantile_s(self, share: float) -> float:
        """Return the time to the first token that ``share`` of the requests stay within."""
        ordered = sorted(self.ttft_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class NoTokens(tuple[int, ...]):
    """Stands for a prompt's token ids where only their number counts: the cache has the bytes."""

    _num_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> "NoTokens":
        """Return a stand-in for ``num_tokens`` tokens: an empty tuple but for its length."""
        stand_in = cls()
        stand_in._num_tokens = num_tokens
        return stand_in

    def __len__(self) -> int:
        return self._num_tokens


@dataclass(slots=True)
class _Running:
    """A request in flight, and what it is to generate."""

    request: Request
    call: Call
    lane: int
    arrival_s: float
    num_given: int = 0
    """Output tokens handed to the request so far."""
    has_first: bool = False

    def token(self) -> int:
        """Return the next token that the request generates."""
        [token] = self.tokens(1)
        return token

    def tokens(self, num_tokens: int) -> list[int]:
        """Return the next tokens that the request generates; zeros after the last one of the trace."""
        start = self.num_given * TOKEN_BYTES
        self.num_given += num_tokens
        return decode(self.call.output[start : self.num_given * TOKEN_BYTES].ljust(num_tokens * TOKEN_BYTES, b"\0"))


class SimulatedClock:
    """The seconds that have passed on the simulated machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Replay:
    """One trace on one machine under one policy.

    Args:
        emits_events: whether the cache collects events.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(self, machine: Machine, policy_name: str, *, emits_events: bool = False) -> None:
        self.machine = machine
        self._clock = SimulatedClock()
        spec = machine.spec
        num_slabs = machine.memory_bytes // spec.slab_bytes
        self.cache = make_cache(
            policy(policy_name),
            num_slabs,
            spec.blocks_per_slab,
            self._clock,
            resume_rule(spec),
            emits_events=emits_events,
        )
        self.result = Result(policy_name, machine.memory_bytes)
        self._scheduler = Scheduler(
            self.cache, max_num_seqs=machine.max_num_seqs, max_num_batched_tokens=machine.max_num_batched_tokens
        )
        self._seen = SeenPrefixes()
        self._running: dict[RequestId, _Running] = {}
        self._arrivals: list[tuple[float, int, int, Call]] = []
        self._lanes: list[tuple[float, Iterator[Call]]] = []
        self._num_calls = 0
        # Three slabs stay for a request's own state, a snapshot and the slab that is not whole.
        slabs_for_blocks = self.cache.memory_use().max_blocks // spec.blocks_per_slab - 3
        self._most_tokens = slabs_for_blocks * spec.blocks_per_slab * BLOCK_TOKENS

    def run(self, lanes: Sequence[Lane], progress: Callable[[int], object] = lambda _: None) -> Result:
        """Replay the lanes to their end.

        Args:
            progress: called with 1 whenever a request has ended.
        """
        self._lanes = [(lane.start_s, lane.calls()) for lane in lanes]
        for index, (start_s, _) in enumerate(self._lanes):
            self._call_next(index, start_s)
        while self._arrivals or len(self._scheduler):
            if not len(self._scheduler):
                self._clock.now_s = max(self._clock.now_s, self._arrivals[0][0])
            self._receive()
            if len(self._scheduler):
                self._step(progress)
        return self._finish()

    # Requests

    def request(self, request_id: RequestId) -> Request:
        """Return a request that has arrived and has not ended."""
        return self._running[request_id].request

    def _call_next(self, lane: int, ended_s: float) -> None:
        start_s, calls = self._lanes[lane]
        for call in calls:
            if len(call.prompt) == 0 or len(call.prompt) + len(call.output) > self._most_tokens * TOKEN_BYTES:
                self.result.num_refused += 1
                continue
            arrival_s = max(start_s + call.at_s, ended_s + call.think_s)
            self._num_calls += 1
            heapq.heappush(self._arrivals, (arrival_s, self._num_calls, lane, call))
            return

    def _receive(self) -> None:
        """Take in what has arrived by now."""
        while self._arrivals and self._arrivals[0][0] <= self._clock.now_s:
            arrival_s, number, lane, call = heapq.heappop(self._arrivals)
            num_prompt, num_output = len(call.prompt) // TOKEN_BYTES, max(len(call.output) // TOKEN_BYTES, 1)
            new = NewRequest(RequestId(str(number)), NoTokens.of(num_prompt), NOTHING, 0, frozenset(), ())
            request = Request(new, max_total=num_prompt + num_output, marks=call.marks)
            request.tokens.data = call.prompt
            self.result.num_requests += 1
            self.result.prompt_tokens += num_prompt
            self.result.ideal_tokens += self._seen.add(call.prompt)
            self._running[request.request_id] = _Running(request, call, lane, arrival_s)
            self._scheduler.add(request)

    # Steps

    def _step(self, progress: Callable[[int], object]) -> None:
        self._hand_out_tokens()
        plan = self._scheduler.plan()
        if plan is None:
            raise EngineError("requests wait, and none of them runs")
        self._clock.now_s += self._cost_s(plan)
        self._count(plan)
        tokens = [(self._running[s.request_id].token(),) if s.is_sampled else () for s in plan.sequences]
        for request in self._scheduler.commit(plan, StepResult(tuple(tokens))):
            running = self._running[request.request_id]
            if not running.has_first:
                running.has_first = True
                self.result.ttft_s.append(self._clock.now_s - running.arrival_s)
            if request.is_finished:
                self._end(running)
                progress(1)

    def _hand_out_tokens(self) -> None:
        """Let decodes run several tokens in one step when nothing can happen in between."""
        running = self._scheduler.running
        if not running or self._scheduler.waiting:
            return
        num_left = []
        for request in running:
            if request.lease is None or request.lease.computed + 1 != request.num_tokens or not request.output_ids:
                return
            num_left.append(request.max_total - request.num_tokens)
        step_s = self.machine.cost.step_s + sum(self.machine.cost.decode_s(request.num_tokens) for request in running)
        until_s = self._arrivals[0][0] - self._clock.now_s if self._arrivals else float("inf")
        steps = min(*num_left, self.machine.max_num_batched_tokens // len(running), until_s / step_s + 1)
        for request in running:
            more = int(steps) - 1
            if more > 0:
                self._scheduler.append_known(request, self._running[request.request_id].tokens(more))

    def _cost_s(self, plan: StepPlan) -> float:
        """Return the duration of the step; with n decoded tokens per sequence, that of n steps."""
        cost = self.machine.cost
        prefill_s = decode_s = 0.0
        num_steps = 1
        for sequence in plan.sequences:
            request = self._running[sequence.request_id].request
            if sequence.start >= request.num_prompt_tokens:
                num_tokens = sequence.end - sequence.start
                num_steps = max(num_steps, num_tokens)
                decode_s += num_tokens * cost.decode_s(sequence.start)
            else:
                prefill_s += cost.prefill_s(sequence.start, sequence.end)
        self.result.num_steps += num_steps
        return num_steps * cost.step_s + prefill_s + decode_s

    def _count(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            num_prompt = self._running[sequence.request_id].request.num_prompt_tokens
            self.result.prefilled_tokens += max(min(sequence.end, num_prompt) - sequence.start, 0)
        for action in plan.actions:
            match action:
                case CopyTokens(_, _, num_tokens):
                    self.result.copied_tokens += num_tokens
                case MoveBlock():
                    self.result.moved_blocks += 1
                case DropBlocks() | DropSlot() | FoldLog() | LoadIn() | StoreOut() | CancelTransfer():
                    pass
                case _:
                    assert_never(action)

    def _end(self, running: _Running) -> None:
        request = running.request
        del self._running[request.request_id]
        if request.account is None:
            raise EngineError(f"request {request.request_id} ended without an account")
        self.result.hit_tokens += request.account.hit
        for miss in request.account.misses:
            self.result.missed_tokens[miss.reason] += miss.num_tokens
        self._seen.add(request.tokens.data)
        self._call_next(running.lane, self._clock.now_s)

    def _finish(self) -> Result:
        result, stats = self.result, self.cache.stats()
        result.simulated_s = self._clock.now_s
        result.num_preemptions = self._scheduler.num_preemptions
        result.num_snapshots = sum(stats.snapshots_taken.values())
        result.slot_bytes = stats.memory.num_slots * self.machine.spec.slab_bytes
        result.block_bytes = stats.memory.num_blocks * self.machine.spec.block_bytes
        return result
