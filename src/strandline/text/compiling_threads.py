"""Threads that compile grammars. The process does not wait for them when it exits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

NUM_THREADS: Final = 2
"""More than one, so that a slow grammar does not delay all others."""
STACK_BYTES: Final = 8 * 2**20
"""llguidance's compiler is recursive, and an overflow ends the process."""

P = ParamSpec("P")
T = TypeVar("T")


class CompilingThreads:
    """Runs calls in daemon threads, in the order of submission."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        usual_bytes = threading.stack_size(STACK_BYTES)
        for index in range(NUM_THREADS):
            threading.Thread(target=self._run, name=f"grammars {index}", daemon=True).start()
        threading.stack_size(usual_bytes)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call a function in a thread as soon as one is free; return its future result."""
        future = Future[T]()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and let the threads end after those that have."""
        with suppress(Empty):
            while (found := self._calls.get_nowait()) is not None:
                found[0].cancel()
        for _ in range(NUM_THREADS):
            self._calls.put(None)

    def _run(self) -> None:
        while (found := self._calls.get()) is not None:
            future, call = found
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - reading the result raises it
                    future.set_exception(error)
