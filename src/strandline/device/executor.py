"""Executors run the steps planned by the core: the interface between the engine and its devices.

An executor owns weights, the memory of blocks and slots, and the per-request data on the device. Plans are its only
source of requests, so it may run in this process or in another one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strandline.device.batches.prompt_room import NO_PROMPTS, PromptRoom
from strandline.device.stores.arena_copies import Copies
from strandline.device.stores.lower_stores import LowerFacts
from strandline.device.stores.peer_store import PeerStore
from strandline.device.stores.transfers import Completions
from strandline.kernels.binding import Fallback
from strandline.picture_config import PictureConfig
from strandline.records.actions import Action, Completion
from strandline.records.adapters import LoadedAdapter
from strandline.records.control import MEMORIES, Memory, WeightsAction
from strandline.records.events import Limits
from strandline.records.plan import StepPlan, StepResult
from strandline.records.sampling_params import StructuredOutputsParams
from strandline.specs import ModelSpec, RoutingShape


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """Facts about a model on its device that the core needs to plan steps."""

    spec: ModelSpec
    vocab_size: int
    max_model_len: int
    """The longest request that configuration, model and memory allow, in tokens."""
    device_type: str
    num_slabs: int
    """The memory for blocks and slots."""
    log_tokens: int
    """Tokens in a full log; 0: decoding sequences keep none."""
    needs_warm_up: bool
    """Whether kernels are compiled when a step first needs them, so that every kind of step must run once."""
    fallbacks: tuple[Fallback, ...]
    """Operations that run reference implementations, although their backends should be available here."""
    lower: LowerFacts = field(default_factory=LowerFacts)
    """Facts about host memory and the disk cache."""
    draft_tokens: int = 0
    """Maximum drafts per sequence and step; 0: no drafts."""
    corrects_lengths: bool = False
    """Whether, once graphs are captured, steps in which all sequences verify drafts can be launched before it is known
    how many drafts of the step before are accepted."""
    verified_prompts: PromptRoom = NO_PROMPTS
    """The prompts that such steps may compute as well."""
    picture_config: PictureConfig | None = None
    """How pictures are prepared; None: the model reads none."""
    encoder_tokens: int = 0
    """Rows of the memory of encoded pictures; 0: the model reads no pictures."""
    changes_weights: bool = True
    """Whether other weights of the same model can be read; not where adapters or encoded pictures depend on them."""
    routing_shape: RoutingShape | None = None
    """What is recorded of the experts that tokens are routed to; None: nothing."""
    num_ranks: int = 1
    """Ranks that the model is divided among. Sizes are those of one rank, and the same for all."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Duration of each phase of the start."""

    @property
    def limits(self) -> Limits:
        """Limits that requests are checked against."""
        return Limits(
            self.vocab_size,
            self.max_model_len,
            self.encoder_tokens,
            routing_shape=self.routing_shape,
            changes_weights=self.changes_weights,
        )


class LaunchedStep(Protocol):
    """A step in flight."""

    @property
    def is_launch_bound(self) -> bool:
        """Whether launching the step took longer than the device needs to run it."""

    def result(self) -> StepResult:
        """Wait for the device and return the step's result. Called once."""


class Stores(Protocol):
    """Attachment of stores that move bytes between an engine's devices and others."""

    @property
    def completions(self) -> Completions:
        """Queue for the ends of transfers."""

    def attach(self, name: str, store: PeerStore) -> None:
        """Carry out transfers that name this store with it."""


class Executor(Protocol):
    """Runs steps, in the order in which they are launched."""

    @property
    def facts(self) -> ExecutorFacts:
        """Facts about model and device."""

    @property
    def copies(self) -> Copies:
        """Copies of blocks and slots, for use in other threads than the engine's."""

    @property
    def stores(self) -> Stores:
        """Where stores of the engine's process are attached."""

    @property
    def worker_fds(self) -> Sequence[int]:
        """A file descriptor for each process that runs steps; it becomes readable when the process has ended."""

    def check_workers(self) -> None:
        """Do nothing if all these processes run.

        Raises:
            EngineError: one has ended.
        """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step without waiting for the device. Its actions and writes come after those of earlier steps."""

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Apply the cache's actions, in order, outside a step."""

    def poll_transfers(self) -> tuple[Completion, ...]:
        """Return ended transfers that no result has reported, as far as that takes no time; results report the rest."""

    def wait_for_transfers(self, timeout_s: float) -> tuple[Completion, ...]:
        """Return the ended transfers that no result has reported; wait for one, until the timeout."""

    def compile_grammar(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar in the calling thread, so that no step has to; any thread may call.

        Returns:
            An object to hold on to: as long as it exists, the compiled grammar is kept.

        Raises:
            RequestError: the grammar cannot be compiled.
        """

    def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Read a LoRA adapter, which requests can then name by its digest.

        Raises:
            RequestError: the engine takes no adapters.
            ConfigError: the adapter cannot be read, is not the model's, or has too large a rank.
        """

    def load_empty_adapter(self) -> str:
        """Add an adapter that changes nothing, for warm-up requests; return its digest. The engine takes adapters."""

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter that no request uses. An unknown one is ignored."""

    def begin_warm_up(self) -> None:
        """From the next step on, compute a part of the model's layers that launches all of its kernels."""

    def end_warm_up(self) -> None:
        """Compute all layers again."""

    def forget_requests(self) -> None:
        """Drop the data of requests (all have ended) and the scratch memory of their steps."""

    def capture_graphs(self) -> None:
        """Capture CUDA graphs of frequent steps, to be replayed from now on."""

    def sleep(self, level: int, memories: Collection[Memory] = MEMORIES) -> None:
        """Give memory back; no step follows before ``wake_up``.

        Args:
            level: 1: weights stay in host memory; 2: they are read again.
        """

    def wake_up(self, memory: Memory) -> bool:
        """Take memory again that has been given back; return False if weights are to be sent again first.

        Raises:
            ConfigError: the weights cannot be read again.
            OutOfMemoryError: there is too little memory. No rank has taken any.
        """

    def change_weights(self, action: WeightsAction) -> None:
        """Do a part of a change of weights, on all ranks. Those in use stay until ``UseWeights``; no step is in flight.

        Raises:
            ConfigError: a trainer sends nothing to this engine, does not come, or does not send what it announced; or
                weights cannot be read, or are not the model's. No rank uses them.
            OutOfMemoryError: there is too little memory for them, on the host or, after ``sleep``, on the device. No
                rank has taken any, or uses them.
        """

    def release_free_memory(self) -> None:
        """Return memory that is kept for the next step's intermediate results to the system."""

    def close(self) -> None:
        """Release the device. Nothing is launched afterwards; a second call does nothing."""
