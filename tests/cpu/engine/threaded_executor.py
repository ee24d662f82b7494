"""An executor whose ranks are threads of this process: as ``MpExecutor`` with several, without starting processes."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from strandline.config import EngineConfig
from strandline.device.uni_executor import UniExecutor
from strandline.engine.loading import load_uni_executor
from strandline.engine.workers.engine_stores import EngineStores
from strandline.engine.workers.joined_completions import JoinedCompletions
from strandline.engine.workers.rank_copies import RankCopies
from strandline.engine.workers.rank_facts import join_facts
from strandline.records.actions import Action, Completion
from strandline.records.plan import StepPlan, StepResult
from tests.cpu.models.rank_threads import RankThread, RankThreads

T = TypeVar("T")


class ThreadedStep:
    """A step in flight on all ranks."""

    is_launch_bound = False

    def __init__(self, futures: "list[Future[StepResult]]", joined: JoinedCompletions, stores: EngineStores) -> None:
        self._futures, self._joined, self._stores = futures, joined, stores

    def result(self) -> StepResult:
        results = [future.result() for future in self._futures]
        first, *others = results
        assert all((other.token_ids, other.drafts) == (first.token_ids, first.drafts) for other in others)
        ended = self._joined.add([result.completions for result in results])
        return replace(first, completions=(*ended, *self._stores.take()))


class ThreadedExecutor:
    """Runs every call on all ranks, each in a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        group = RankThreads(config.tensor_parallel_size)
        self._threads = [ThreadPoolExecutor(1) for _ in range(group.size)]
        loading = [
            thread.submit(load_uni_executor, config, ranks=RankThread(group, rank))
            for rank, thread in enumerate(self._threads)
        ]
        self.ranks: list[UniExecutor] = [future.result() for future in loading]
        self.facts, renames = join_facts([each.facts for each in self.ranks])
        for rank, addresses in zip(self.ranks, renames, strict=False):
            rank.rename_stored(addresses)
        self._copying = ThreadPoolExecutor(group.size)
        self._joined, self.stores = JoinedCompletions(group.size), EngineStores()

    @property
    def copies(self) -> RankCopies:
        def call(method: str, *arguments: Any) -> "list[Future[Any]]":
            begun = self._submit(lambda executor: getattr(executor, method)(*arguments))
            return [self._copying.submit(lambda future=future: future.result()()) for future in begun]

        return RankCopies(call, self.facts.spec.whole)

    def launch(self, plan: StepPlan) -> ThreadedStep:
        own, others = self.stores.split(plan.actions)
        futures = self._submit(lambda executor: executor.launch(replace(plan, actions=tuple(others))).result())
        self.stores.begin(own)
        return ThreadedStep(futures, self._joined, self.stores)

    def carry_out(self, actions: Sequence[Action]) -> None:
        own, others = self.stores.split(actions)
        for future in self._submit(lambda executor: executor.carry_out(others)):
            future.result()
        self.stores.begin(own)

    def poll_transfers(self) -> tuple[Completion, ...]:
        """Return nothing: results report all."""
        return ()

    def wait_for_transfers(self, timeout_s: float) -> tuple[Completion, ...]:
        if self.stores:
            return self.stores.take(timeout_s)
        futures = [
            thread.submit(rank.wait_for_transfers, wait_s)
            for thread, rank, wait_s in zip(self._threads, self.ranks, self._joined.timeouts_s(timeout_s), strict=True)
        ]
        return self._joined.add([future.result() for future in futures])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            first, *_ = [future.result() for future in self._submit(lambda x: getattr(x, name)(*arguments))]
            return first

        return call

    def _submit(self, function: Callable[[UniExecutor], T]) -> "list[Future[T]]":
        return [thread.submit(function, rank) for thread, rank in zip(self._threads, self.ranks, strict=True)]

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        for rank in self.ranks:
            rank.close()
        for thread in (*self._threads, self._copying):
            thread.shutdown()
