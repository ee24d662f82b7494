"""The executor whose steps run in workers (``engine/processes/worker.py``), one for each rank of tensor parallelism."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final
from weakref import finalize

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.executor import LaunchedStep
from strandline.engine.startup.model_identity import weights_of_files
from strandline.engine.workers.engine_stores import EngineStores
from strandline.engine.workers.joined_completions import JoinedCompletions
from strandline.engine.workers.packed_plan import PlanPacker
from strandline.engine.workers.rank_copies import RankCopies
from strandline.engine.workers.rank_facts import join_facts
from strandline.engine.workers.workers import Workers
from strandline.errors import EngineError
from strandline.records.actions import Action, Completion
from strandline.records.adapters import LoadedAdapter
from strandline.records.control import MEMORIES, JoinTrainer, Memory, PrepareWeights, ReceiveWeights, WeightsAction
from strandline.records.plan import StepPlan, StepResult
from strandline.records.sampling_params import StructuredOutputsParams

STEP_TIMEOUT_S: Final = 300.0
"""How long a step may take: more than the compilation of its kernels."""


class RemoteStep:
    """A step in flight in the workers."""

    is_launch_bound = False

    def __init__(
        self,
        workers: Workers,
        joined: JoinedCompletions,
        stores: EngineStores,
        futures: "Sequence[Future[StepResult]]",
        timeout_s: float,
    ) -> None:
        self._workers, self._joined, self._stores = workers, joined, stores
        self._futures, self._timeout_s = futures, timeout_s

    def result(self) -> StepResult:
        """Wait for all ranks, and return what the step produced.

        Raises:
            EngineError: a rank chose other tokens than the first.
        """
        results: list[StepResult] = self._workers.results(self._futures, self._timeout_s, "a step")
        first, *others = results
        for rank, result in enumerate(others, 1):
            if (result.token_ids, result.drafts) != (first.token_ids, first.drafts):
                raise EngineError(f"rank {rank} chose other tokens than rank 0: {result.token_ids}, {first.token_ids}")
        ended = self._joined.add([result.completions for result in results])
        return replace(first, completions=(*ended, *self._stores.take()))


class CompiledElsewhere:
    """Holds a grammar that the workers have compiled."""


class MpExecutor:
    """Runs steps in worker processes: every rank runs every step, on its part of the model.

    Args:
        workers: have been spawned; the executor has them load the model, and ends them when it is closed.

    Raises:
        ConfigError: model, weights or memory do not allow it.
    """

    def __init__(self, config: EngineConfig, workers: Workers, *, progress: bool = False) -> None:
        self._step_timeout_s = STEP_TIMEOUT_S
        self._workers = workers
        self._packer = PlanPacker()
        self._joined = JoinedCompletions(config.tensor_parallel_size)
        self.stores = EngineStores()
        """Where stores of the engine's process are attached."""
        self._finalizer = finalize(self, self._workers.close)
        start_s = SYSTEM_CLOCK()
        weights = weights_of_files(config)  # all are read: once, and not by every rank
        weights_s = SYSTEM_CLOCK() - start_s
        self.facts, renames = join_facts(self._workers.start(config, weights, progress=progress))
        self.facts.start_s["weights"] += weights_s
        if renames:
            self._workers.results(self._workers.call_each("rename_stored", [(addresses,) for addresses in renames]))

    @property
    def process_ids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return self._workers.process_ids

    @property
    def worker_fds(self) -> list[int]:
        """A descriptor for each worker, by rank, that becomes readable when it has ended."""
        return self._workers.fds

    def check_workers(self) -> None:
        """Raise ``EngineError`` if a worker has ended."""
        self._workers.check()

    @property
    def copies(self) -> RankCopies:
        """What reads and writes blocks and slots of the whole model from any thread."""
        return RankCopies(self._begin, self.facts.spec.whole)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Send a plan to the workers."""
        own, others = self.stores.split(plan.actions)
        if own:
            plan = replace(plan, actions=tuple(others))
        futures = self._begin("launch", self._packer.pack(plan))
        self.stores.begin(own)
        return RemoteStep(self._workers, self._joined, self.stores, futures, self._step_timeout_s)

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Apply the cache's actions, in order, outside a step."""
        own, others = self.stores.split(actions)
        if others:
            self._call("carry_out", tuple(others))
        self.stores.begin(own)

    def poll_transfers(self) -> tuple[Completion, ...]:
        """Return ended transfers of this process's stores; to ask the workers would take a message to each."""
        return self.stores.take()

    def wait_for_transfers(self, timeout_s: float) -> tuple[Completion, ...]:
        """Return the transfers that have ended on all ranks and that no result has reported.

        Wait until each rank that others wait for has reported one, or so long; while stores of this process have
        transfers, wait for these alone.
        """
        is_own = len(self.stores) > 0
        own = self.stores.take(timeout_s)
        timeout_s = 0.0 if is_own else timeout_s
        arguments = [(wait_s,) for wait_s in self._joined.timeouts_s(timeout_s)]
        futures = self._workers.call_each("wait_for_transfers", arguments)
        results = self._workers.results(futures, timeout_s + self._step_timeout_s, "wait_for_transfers")
        return (*own, *self._joined.add(results))

    def compile_grammar(self, params: StructuredOutputsParams) -> object:
        """Have the workers compile a grammar beside their steps; any thread may call.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        number, futures = self._workers.call("compile_grammar", params)
        self._workers.results(futures)
        held = CompiledElsewhere()
        finalize(held, self._workers.release, number).atexit = False
        return held

    def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Have the workers read a LoRA adapter; raises as ``AdapterPool.load``."""
        loaded: LoadedAdapter = self._call("load_adapter", name, path)[0]
        return loaded

    def load_empty_adapter(self) -> str:
        """Have the workers add an adapter that changes nothing; return its digest."""
        digest: str = self._call("load_empty_adapter")[0]
        return digest

    def unload_adapter(self, digest: str) -> None:
        """Have the workers forget an adapter that no request uses."""
        self._call("unload_adapter", digest)

    def begin_warm_up(self) -> None:
        """Have the workers compute distinct layers alone."""
        self._call("begin_warm_up")

    def end_warm_up(self) -> None:
        """Have the workers compute all layers again."""
        self._call("end_warm_up")

    def forget_requests(self) -> None:
        """Drop all data of requests, and the scratch memory of their steps."""
        self._packer.forget_requests()
        self._call("forget_requests")

    def capture_graphs(self) -> None:
        """Capture CUDA graphs in the workers."""
        self._workers.results(self._begin("capture_graphs"))  # however long compilation takes

    def sleep(self, level: int, memories: Collection[Memory] = MEMORIES) -> None:
        """Have the workers give their memory back."""
        self._call("sleep", level, tuple(memories))

    def wake_up(self, memory: Memory) -> bool:
        """Have the workers take memory again; returns and raises as ``Executor.wake_up``."""
        return all(self._workers.results(self._begin("wake_up", memory)))  # however long files take

    def change_weights(self, action: WeightsAction) -> None:
        """Have the workers do a part of a change of weights; raises as ``Executor.change_weights``."""
        waits_for_data = isinstance(action, JoinTrainer | ReceiveWeights | PrepareWeights)
        timeout_s = None if waits_for_data else self._step_timeout_s
        self._workers.results(self._begin("change_weights", action), timeout_s, "change_weights")

    def release_free_memory(self) -> None:
        """Return the workers' free memory to the system."""
        self._call("release_free_memory")

    def close(self) -> None:
        """End transfers and the workers, and wait for their end."""
        self.stores.close()
        self._finalizer()

    def _begin(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return self._workers.call(method, *arguments)[1]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._workers.results(self._begin(method, *arguments), self._step_timeout_s, method)
