"""The executor that runs steps in this process."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import torch

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.batches.padded_step import StepSize
from strandline.device.executor import ExecutorFacts, LaunchedStep
from strandline.device.hardware.heap import release_free_memory
from strandline.device.hardware.out_of_memory import free_bytes, lack_of_memory, reserved_bytes
from strandline.device.runner import RUNNER_OPERATIONS, Capacity, Runner
from strandline.device.sizing import (
    choose_batched_tokens,
    choose_draft_tokens,
    choose_encoder_tokens,
    choose_max_model_len,
    choose_memory_bytes,
    choose_window_blocks,
    keeps_decoded,
    require_determinism,
)
from strandline.device.steps.graph_sizes import graph_sizes, prompt_room, verification_sizes
from strandline.device.stores.arena_copies import ArenaCopies, Entries
from strandline.device.stores.lower_stores import attach_stores, lower_device_bytes
from strandline.device.stores.shared_copies import Copy, SharedCopies
from strandline.device.stores.transfers import Transfers
from strandline.device.weight_changes import WeightChanges
from strandline.device.weights.model_memory import LentMemory, TensorMemory
from strandline.device.weights.weight_receiver import WeightReceiver
from strandline.env import is_cache_debugged
from strandline.errors import ConfigError, EngineError, OutOfMemoryError
from strandline.kernels.binding import Kernels, bind_kernels
from strandline.kernels.gpu import kind_of
from strandline.kernels.operation import Workload
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.models.layers.protocol import LanguageModel
from strandline.records.actions import Action, Completion
from strandline.records.adapters import LoadedAdapter
from strandline.records.constraints import OutputConstraints
from strandline.records.control import (
    MEMORIES,
    BeginWeights,
    DropWeights,
    JoinTrainer,
    LeaveTrainer,
    Memory,
    PrepareWeights,
    ReceiveWeights,
    UseWeights,
    WeightsAction,
)
from strandline.records.plan import StepPlan
from strandline.records.sampling_params import StructuredOutputsParams

PREFAULTED_BYTES: Final = 512 * 2**20
"""Prefaulted beginning of a CPU's memory for the cache, where slots and blocks are allocated first. The system zeroes a
page before it hands it out, and a virtual machine requests it from its host: 2 to 12 ms per slot of 3 MiB."""

UNREADABLE: Final = -2
LACKS_MEMORY: Final = -1
"""What a rank tells the others that could not do what all are to do; less than a bool."""
LOGGER: Final = logging.getLogger(__name__)


class UniExecutor:
    """Owns a runner, and the memory that it computes in.

    Args:
        model: loaded weights on ``device``; with several ranks, this one's shard.
        constraints: constraints of outputs; None: requests have no grammars, budgets of reasoning or stop strings.
        weights: a digest of the model's weights, for what outlives the process.
        loading_s: how long the phases of loading the model took.
        progress: show progress bars while kernels are compiled and graphs captured.

    Raises:
        ConfigError: the model cannot run as configured, or the memory does not hold one request.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        device: torch.device,
        constraints: OutputConstraints | None = None,
        ranks: Ranks = ONE_RANK,
        *,
        weights: str = "",
        loading_s: Mapping[str, float] = MappingProxyType({}),
        progress: bool = False,
    ) -> None:
        model.spec = spec = choose_window_blocks(model)
        device_type = kind_of(device)
        self._config, self._ranks, self._constraints = config, ranks, constraints
        self._progress, self._warm_up = progress, ExitStack()
        start_s = {"weights": 0.0, **loading_s}
        with _timed(start_s, "kernels"):
            kernels = choose_kernels(
                model, device_type, ranks, is_deterministic=config.deterministic, progress=progress
            )
            model.use_kernels(kernels)
        if config.deterministic:
            require_determinism(spec, kernels)
        with _timed(start_s, "memory"):
            capacity, max_model_len = _choose_capacity(model, config, kernels, device, ranks)
            self.runner = Runner(
                model,
                kernels,
                device,
                capacity,
                constraints,
                poison=is_cache_debugged(),
                synthetic_rates=None if config.speculation is None else config.speculation.synthetic_acceptance_rates,
            )
            if device.type == "cpu":
                self.runner.arena.prefault(PREFAULTED_BYTES)
            lower, self._files = attach_stores(
                config, self.runner.arena, self.runner.transfers, weights, ranks, progress=progress
            )
        self._graph_sizes = _choose_graph_sizes(config, capacity, device_type)
        self._given_back = set[Memory]()
        self.weights, self._receiver = WeightChanges(self.runner, config.model), _new_receiver(config, ranks, device)
        arena_memory = TensorMemory([self.runner.arena.bytes], "blocks and slots of the cache")
        self._memories: dict[Memory, LentMemory] = {"weights": self.weights, "kv_cache": arena_memory}
        self._graph_bytes = 0
        corrects_lengths = capacity.draft_tokens > 0 and kernels.is_compiled_on_gpu and not config.enforce_eager
        self.facts = ExecutorFacts(
            spec,
            model.vocab_size,
            max_model_len,
            device_type,
            capacity.num_slabs,
            spec.log_tokens if capacity.keeps_logs else 0,
            needs_warm_up=kernels.is_compiled_on_gpu,
            fallbacks=kernels.fallbacks,
            lower=lower,
            draft_tokens=capacity.draft_tokens,
            corrects_lengths=corrects_lengths,
            verified_prompts=prompt_room(self._graph_sizes if corrects_lengths else ()),
            picture_config=None if model.tower is None else model.tower.pictures,
            encoder_tokens=capacity.encoder_tokens,
            changes_weights=not config.enable_lora and model.tower is None,
            routing_shape=model.routing_shape,
            num_ranks=ranks.size,
            start_s=start_s,
        )

    @cached_property
    def copies(self) -> ArenaCopies:
        """What reads and writes blocks and slots from other threads than the engine's."""
        return ArenaCopies(self.runner.arena)

    @property
    def stores(self) -> Transfers:
        """Where stores of the engine's process are attached."""
        return self.runner.transfers

    @cached_property
    def _shared(self) -> SharedCopies:
        return SharedCopies(self.copies, self.facts.spec, self._ranks)

    def begin_read(self, path: str, entries: Entries) -> Copy:
        """Return what copies this rank's part of entries to shared memory, in any thread."""
        return self._shared.begin_read(path, entries)

    def begin_write(self, path: str, entries: Entries) -> Copy:
        """Return what copies this rank's part of entries from shared memory, in any thread."""
        return self._shared.begin_write(path, entries)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step without waiting for the device."""
        return self.runner.launch(plan)

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Apply the cache's actions, in order, outside a step."""
        self.runner.carry_out(actions)

    def poll_transfers(self) -> tuple[Completion, ...]:
        """Return the transfers that have ended and that no result has reported."""
        return self.runner.transfers.take()

    def wait_for_transfers(self, timeout_s: float) -> tuple[Completion, ...]:
        """Return the transfers that have ended and that no result has reported; wait until there is one, or so long."""
        return self.runner.transfers.wait(timeout_s)

    def rename_stored(self, addresses: Mapping[int, int]) -> None:
        """Rename the addresses of what its files store, and remove what gets no new one. Before any step."""
        if self._files is not None:
            self._files.rename(addresses)

    def compile_grammar(self, params: StructuredOutputsParams) -> object:
        """Compile a grammar in the calling thread; any thread may call.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        if self._constraints is None:
            raise EngineError("a request with structured outputs came to an executor without a tokenizer")
        return self._constraints.grammars.compile(params)

    def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Read a LoRA adapter; raises as ``AdapterPool.load``."""
        return self.runner.adapters.load(name, path)

    def load_empty_adapter(self) -> str:
        """Add an adapter that changes nothing, for warm-up requests; return its digest."""
        return self.runner.adapters.load_empty()

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter that no request uses."""
        self.runner.adapters.unload(digest)

    def begin_warm_up(self) -> None:
        """From the next step on, compute distinct layers alone."""
        self._warm_up.enter_context(self.runner.model.computing_distinct_layers())

    def end_warm_up(self) -> None:
        """Compute all layers again."""
        self._warm_up.close()

    def forget_requests(self) -> None:
        """Drop all data of requests, and the scratch memory of their steps."""
        self.runner.forget_requests()
        if self.facts.device_type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self, level: int, memories: Collection[Memory] = MEMORIES) -> None:
        """Give back memory, unless it is given back already, and that of graphs.

        On a CPU, weights of level 1 stay where they are, which is the host's memory.

        Args:
            level: 1: keep the weights in the host's memory. 2: keep no copy, not even that of an earlier sleep.
        """
        self.runner.drop_graphs()
        for memory in memories:
            if memory not in self._given_back:
                self._memories[memory].give_back(keeps=memory == "weights" and level == 1)
            elif memory == "weights" and level > 1:
                self.weights.forget_kept()
        self._given_back.update(memories)
        self.release_free_memory()

    def wake_up(self, memory: Memory) -> bool:
        """Take memory again; return False if weights are to be sent again first.

        Raises: as ``Executor.wake_up``.
        """
        return memory not in self._given_back or self._take(memory, self._memories[memory].take_again)

    def _take(self, memory: Memory, take: Callable[[], bool]) -> bool:
        """Take memory again on all ranks, or on none.

        If no memory is given back any more, graphs are captured again: it may be elsewhere now.

        Args:
            take: takes it on this rank, until that is confirmed or undone; returns and raises as this function.
        """
        try:
            was_taken = self._on_all_ranks(take)
            if was_taken and self._given_back == {memory}:
                self._on_all_ranks(self._has_room_for_graphs)
                self.capture_graphs()
        except (ConfigError, OutOfMemoryError):
            self.runner.drop_graphs()
            self._memories[memory].undo()
            raise
        if was_taken:
            self._memories[memory].confirm()
            self._given_back.remove(memory)
        return was_taken

    def _on_all_ranks(self, do: Callable[[], bool]) -> bool:
        """Do something that may fail on every rank; return whether all return True. If it fails on one, all raise."""
        try:
            outcome = int(do())
        except (ConfigError, OutOfMemoryError) as error:
            outcome = UNREADABLE if isinstance(error, ConfigError) else LACKS_MEMORY
            LOGGER.warning("rank %d of %d: %s", self._ranks.rank, self._ranks.size, error)
            found = self._ranks.least(outcome)
            if found == outcome:
                raise
        else:
            found = self._ranks.least(outcome)
        if found == UNREADABLE:
            raise ConfigError("another rank of the engine cannot read the weights: its log says why")
        if found == LACKS_MEMORY:
            raise OutOfMemoryError("another rank of the engine lacks memory: its log says how much")
        return bool(found)

    def _has_room_for_graphs(self) -> bool:
        """Return True; raise an OutOfMemoryError if the graphs that were captured at the start no longer fit.

        Nothing undoes a capture that runs out of memory: destroying its graph ends the process, and other ranks would
        wait for this one.
        """
        if self._graph_bytes and self._graph_bytes > free_bytes(self.runner.device):
            raise lack_of_memory("captured CUDA graphs", self._graph_bytes, self.runner.device)
        return True

    def change_weights(self, action: WeightsAction) -> None:
        """Do a part of a change of weights; raises as ``Executor.change_weights``."""
        match action:
            case JoinTrainer(group):
                self._receiver.join(group)
            case LeaveTrainer():
                self._receiver.leave()
            case BeginWeights():
                self._receiver.begin()
            case ReceiveWeights(sent):
                self._receiver.receive(sent)
            case PrepareWeights(path):
                self.weights.prepare(self._receiver.take() if path is None else path)
            case UseWeights() if "weights" in self._given_back:
                self._take("weights", self.weights.use)
            case UseWeights():
                self.weights.use()
                self.weights.confirm()
            case DropWeights():
                self.weights.drop()

    def capture_graphs(self) -> None:
        """Capture CUDA graphs, unless the configuration asks for eager steps or operations fall back to torch."""
        if self._config.enforce_eager or not self.facts.needs_warm_up:
            return
        before = reserved_bytes(self.runner.device)
        self.runner.capture_graphs(self._graph_sizes, self.facts.max_model_len, progress=self._progress)
        self._graph_bytes = reserved_bytes(self.runner.device) - before

    @property
    def worker_fds(self) -> Sequence[int]:
        """None: steps run in this process."""
        return ()

    def check_workers(self) -> None:
        """Do nothing."""

    def release_free_memory(self) -> None:
        """Return the heap's free memory to the system."""
        release_free_memory()

    def close(self) -> None:
        """End transfers, and give up graphs. Memory is freed with the executor."""
        self._receiver.leave()
        self.runner.close()


def _choose_capacity(
    model: LanguageModel, config: EngineConfig, kernels: Kernels, device: torch.device, ranks: Ranks
) -> tuple[Capacity, int]:
    """Return what the memory has room for, on every rank, and the longest request in tokens.

    Raises:
        ConfigError: it does not hold one request.
    """
    spec, device_type = model.spec, kind_of(device)
    draft_tokens, keeps_logs = choose_draft_tokens(config, spec, device_type), keeps_decoded(config, spec)
    num_logs = 1 + config.max_num_seqs if keeps_logs or draft_tokens else 0
    num_bytes = ranks.least(choose_memory_bytes(config, model, kernels, device, num_logs))
    num_bytes -= lower_device_bytes(config, spec, device)
    max_model_len = choose_max_model_len(config, spec, model.max_position, num_bytes, device_type)
    encoder_tokens = choose_encoder_tokens(config, model, device_type)
    num_slabs = num_bytes // spec.slab_bytes
    return Capacity(num_slabs, config.max_num_seqs, keeps_logs, draft_tokens, encoder_tokens), max_model_len


def _choose_graph_sizes(config: EngineConfig, capacity: Capacity, device_type: str) -> list[StepSize]:
    """Return the sizes of steps that are captured: without drafts and with, and all of these with adapters, too."""
    sizes = graph_sizes(
        config.max_num_seqs,
        choose_batched_tokens(config, device_type),
        config.tensor_parallel_size,
        takes_pictures=capacity.encoder_tokens > 0,
    )
    if capacity.draft_tokens:
        sizes += verification_sizes(sizes, capacity.draft_tokens)
    if config.enable_lora:
        sizes += [replace(size, num_adapters=config.max_loras) for size in sizes]
    return sizes


def _new_receiver(config: EngineConfig, ranks: Ranks, device: torch.device) -> WeightReceiver:
    rank = config.data_parallel_rank * ranks.size + ranks.rank
    return WeightReceiver(config.weight_transfer, rank, device)


def choose_kernels(
    model: LanguageModel,
    device_type: str,
    ranks: Ranks = ONE_RANK,
    *,
    is_deterministic: bool = False,
    progress: bool = False,
) -> Kernels:
    """Choose and load the kernels of a model and its runner."""
    spec = model.spec
    memory = tuple(dict.fromkeys(tensor for layer in spec.layers for tensor in (*layer.streams, *layer.states)))
    workload = Workload(device_type, spec.hidden_dtype, memory, is_deterministic)
    return bind_kernels((*model.operations, *RUNNER_OPERATIONS), workload, ranks, progress=progress)


@contextmanager
def _timed(start_s: dict[str, float], phase: str) -> Iterator[None]:
    start = SYSTEM_CLOCK()
    yield
    start_s[phase] = SYSTEM_CLOCK() - start
