"""LoRA adapters in an engine: which are loaded, and which of them requests use."""

from collections.abc import Callable, Iterable

from strandline.device.executor import Executor
from strandline.engine.requests.request import adapters_of
from strandline.engine.scheduling.scheduler import Scheduler
from strandline.errors import RequestError
from strandline.records.adapters import LoadedAdapter
from strandline.records.events import Submission


class AdapterUse:
    """Loads adapters, and keeps each until no request uses it.

    Args:
        scheduler: has the requests.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._loaded = set[str]()
        self._pending: Callable[[], Iterable[Submission]] = tuple
        self._leaving = set[str]()
        """Those that are to be forgotten once no request uses them."""

    def count(self, pending: Callable[[], Iterable[Submission]]) -> None:
        """Keep the adapters of these sequences, too, which the scheduler does not have yet."""
        self._pending = pending

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter, which requests can then name by its digest; raises as ``Executor.load_adapter``."""
        self._forget()
        adapter = self._executor.load_adapter(name, path)
        self._leaving.discard(adapter.digest)
        self._loaded.add(adapter.digest)
        return adapter

    def unload(self, digest: str) -> None:
        """Forget an adapter once no request uses it. An unknown one is ignored."""
        self._leaving.add(digest)
        self._forget()

    def require(self, digest: str) -> None:
        """Raise a RequestError if an adapter is not loaded; "" names none."""
        if digest and digest not in self._loaded:
            raise RequestError("the LoRA adapter is not loaded any more")

    def _forget(self) -> None:
        used = adapters_of([*self._scheduler.running, *self._scheduler.waiting])
        used |= {submission.new.adapter for submission in self._pending()}
        for digest in sorted(self._leaving - used):
            self._executor.unload_adapter(digest)
            self._leaving.remove(digest)
            self._loaded.discard(digest)
