"""One engine in simulated time: the real cache and scheduler, with a cost model instead of the device.

While no sequence prefills, all decode several tokens at a stretch, up to the next arrival or end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strandline.bench.cost import CostModel
from strandline.bench.load_notes import LoadNotes
from strandline.bench.policies import make_cache, policy
from strandline.bench.simulated_store import HOST_BYTES_PER_S, LATENCY_S, SimulatedStores
from strandline.bench.traces import Call
from strandline.cache.announcing.announcer import Announcer
from strandline.cache.policy.resume_rules import resume_rule
from strandline.cache.policy.window_classes import window_classes
from strandline.cache.tiers import LoadCosts, Loads, LowerMemory
from strandline.cache.tiers.spills import spare_blocks
from strandline.engine.requests.request import Request
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.engine.scheduling.step_limits import StepLimits
from strandline.errors import EngineError
from strandline.ids import BLOCK_TOKENS, RequestId
from strandline.records.adapters import LoadedAdapter, salt_with
from strandline.records.events import Submission
from strandline.records.plan import NewRequest, StepPlan, StepResult
from strandline.records.sampling_params import SamplingParams
from strandline.records.tokens import TOKEN_BYTES, decode
from strandline.specs import ModelSpec
from strandline.tier_sizes import buffer_blocks

DISK_BYTES_PER_S: Final = 6e9
NOTHING: Final = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the trace is replayed on."""

    spec: ModelSpec
    cost: CostModel
    memory_bytes: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    host_bytes: int = 0
    """Host memory below the device."""
    snapshot_dtype: str = "float32"
    """The dtype of snapshots that rest there."""
    disk_bytes: int = 0
    """A disk below that, or below a buffer where there is no host memory."""
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    host_bytes_per_s: float = HOST_BYTES_PER_S
    max_loras: int = 0
    """LoRA adapters that a step can use."""


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
class Running:
    """A request in flight, and what it is to generate."""

    request: Request
    call: Call
    lane: int
    arrival_s: float
    num_given: int = 0
    """Output tokens handed to the request so far."""
    has_first: bool = False

    @classmethod
    def of(cls, name: str, call: Call, lane: int, arrival_s: float, adapter: str = "") -> "Running":
        """Return a call as a request that has arrived.

        Args:
            adapter: LoRA adapter that computes it; "": none.
        """
        num_prompt, num_output = len(call.prompt) // TOKEN_BYTES, max(len(call.output) // TOKEN_BYTES, 1)
        new = NewRequest(RequestId(name), NoTokens.of(num_prompt), NOTHING, 0, frozenset(), (), adapter=adapter)
        # Here, names stand for digests.
        salt = salt_with(LoadedAdapter(adapter, "", adapter, 0) if adapter else None, "")
        request = Request(Submission(new, num_prompt + num_output, salt, marks=call.marks))
        request.tokens.data = call.prompt
        return cls(request, call, lane, arrival_s)

    def token(self) -> int:
        """Return the next token that the request generates."""
        [token] = self.tokens(1)
        return token

    def tokens(self, num_tokens: int) -> list[int]:
        """Return the next tokens that the request generates; zeros after the last one of the trace."""
        start = self.num_given * TOKEN_BYTES
        self.num_given += num_tokens
        return decode(self.call.output[start : self.num_given * TOKEN_BYTES].ljust(num_tokens * TOKEN_BYTES, b"\0"))


def _lower_memories(machine: Machine) -> list[LowerMemory]:
    """Return the memories below the device, nearest first."""
    spec, dtype = machine.spec, machine.snapshot_dtype
    if not machine.host_bytes and not machine.disk_bytes:
        return []
    costs = LoadCosts(LATENCY_S, machine.host_bytes_per_s, machine.cost.prefill_token_s)
    size, snapshots = spec.block_bytes, spec.stored_snapshots(dtype)
    num_blocks, disk_blocks = machine.host_bytes // size, machine.disk_bytes // size
    if num_blocks:
        num_spare_blocks = spare_blocks(num_blocks, spec.blocks_per_slab, snapshots.max_blocks) if disk_blocks else 0
    else:
        num_spare_blocks = num_blocks = buffer_blocks(spec, dtype)
    memories = [LowerMemory("host", num_blocks, size, snapshots, costs, num_spare_blocks)]
    if disk_blocks:
        costs = LoadCosts(LATENCY_S, machine.disk_bytes_per_s, machine.cost.prefill_token_s)
        memories.append(LowerMemory("disk", disk_blocks, size, snapshots, costs, key=b"replay"))
    return memories


class SimulatedClock:
    """The seconds that have passed on the simulated machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has done."""

    num_steps: int
    """Steps of the machine that it stands for."""
    sampled: list[Running]
    """Requests that got tokens, those that have ended among them."""


class Replica:
    """A cache and a scheduler on a machine of their own.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(self, machine: Machine, policy_name: str, *, emits_events: bool) -> None:
        self.machine = machine
        self.clock = SimulatedClock()
        spec = machine.spec
        rule = resume_rule(spec)
        announcer = Announcer(needs_snapshots=rule.needs_snapshots) if emits_events else None
        self.cache = make_cache(
            policy(policy_name),
            machine.memory_bytes // spec.slab_bytes,
            spec.blocks_per_slab,
            self.clock,
            rule,
            announcer=announcer,
            windows=window_classes(spec),
        )
        rates = {"host": machine.host_bytes_per_s, "disk": machine.disk_bytes_per_s}
        self.store = SimulatedStores(spec.stored(machine.snapshot_dtype), rates)
        self.scheduler = Scheduler(
            self.cache,
            Loads(self.cache, _lower_memories(machine), announcer=announcer),
            StepLimits(machine.max_num_seqs, machine.max_num_batched_tokens, max_loras=machine.max_loras),
        )
        self.load_notes: LoadNotes | None = None
        """Notes what loads bring for each request, if that is to be explained."""
        self.running: dict[RequestId, Running] = {}
        """Requests that have arrived and have not ended."""
        self.busy_s = 0.0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that the memory holds."""
        # Three slabs stay for a request's own state, a snapshot and the slab that is not whole.
        blocks_per_slab = self.machine.spec.blocks_per_slab
        slabs_for_blocks = self.cache.memory_use().max_blocks // blocks_per_slab - 3
        for window in window_classes(self.machine.spec):
            # And those of the window and the tokens of a step, which may begin and end inside blocks.
            seen_tokens = window.num_tokens + self.machine.max_num_batched_tokens
            slabs_for_blocks -= -(-(seen_tokens // BLOCK_TOKENS + 3) // window.blocks_per_slab)
        return slabs_for_blocks * blocks_per_slab * BLOCK_TOKENS

    def add(self, running: Running) -> None:
        """Queue a request."""
        self.running[running.request.request_id] = running
        self.scheduler.add(running.request)

    def step(self, longest_s: float, most_steps: int | None, observe: Callable[[StepPlan], None]) -> Step:
        """Run a step; the clock shows its end.

        Args:
            longest_s: time to the next arrival that is known.
            most_steps: most decode steps at a stretch; None: any number.
            observe: called with the plan before it is carried out.
        """
        self._end_transfers()
        self._hand_out_tokens(longest_s, most_steps)
        plan = self.scheduler.plan()
        if plan is None:
            self._wait_for_load(longest_s)
            return Step(0, [])
        self.store.begin(plan.actions, self.clock.now_s)
        cost_s, num_steps = self._cost(plan)
        self.clock.now_s += cost_s
        observe(plan)
        self.busy_s += cost_s
        tokens = [(self.running[s.request_id].token(),) if s.is_sampled else () for s in plan.sequences]
        sampled = [self.running[r.request_id] for r in self.scheduler.commit(plan, StepResult(tuple(tokens)))]
        for running in sampled:
            if running.request.is_finished:
                del self.running[running.request.request_id]
        return Step(num_steps, sampled)

    def _end_transfers(self) -> None:
        ended = self.store.take_ended(self.clock.now_s)
        if self.load_notes is None:
            self.scheduler.loading.complete(transfer.completion for transfer in ended)
        else:
            self.load_notes.complete(ended)

    def _wait_for_load(self, longest_s: float) -> None:
        """Let time pass until a load has ended or a request arrives."""
        self.store.begin(self.cache.take_actions(), self.clock.now_s)
        until_s = min(self.store.next_end_s, self.clock.now_s + longest_s)
        if until_s == float("inf"):
            raise EngineError("requests wait, and none of them runs")
        self.clock.now_s = max(self.clock.now_s, until_s)

    def _hand_out_tokens(self, longest_s: float, most_steps: int | None) -> None:
        """Let decodes run several tokens in one step when nothing can happen in between."""
        decoding = self.scheduler.running
        if not decoding or self.scheduler.waiting:
            return
        num_left = [] if most_steps is None else [most_steps]
        for request in decoding:
            if request.lease is None or request.lease.computed + 1 != request.num_tokens or not request.output_ids:
                return
            num_left.append(request.max_total - request.num_tokens)
        step_s = self.machine.cost.step_s + sum(self.machine.cost.decode_s(request.num_tokens) for request in decoding)
        steps = min(*num_left, self.machine.max_num_batched_tokens // len(decoding), longest_s / step_s + 1)
        for request in decoding:
            more = int(steps) - 1
            if more > 0:
                self.scheduler.append_known(request, self.running[request.request_id].tokens(more))

    def _cost(self, plan: StepPlan) -> tuple[float, int]:
        """Return the duration of the step, and its number of steps: n with n decoded tokens per sequence."""
        cost = self.machine.cost
        prefill_s = decode_s = 0.0
        num_steps = 1
        for sequence in plan.sequences:
            request = self.running[sequence.request_id].request
            if sequence.start >= request.num_prompt_tokens:
                num_tokens = sequence.end - sequence.start
                num_steps = max(num_steps, num_tokens)
                decode_s += num_tokens * cost.decode_s(sequence.start)
            else:
                prefill_s += cost.prefill_s(sequence.start, sequence.end)
        return num_steps * cost.step_s + prefill_s + decode_s, num_steps
