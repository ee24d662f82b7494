"""Calls from transfer threads into the engine's thread, which alone may touch cache and device."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from threading import Lock
from typing import Any, Final, TypeVar
from weakref import finalize

from strandline.transfer.connection import Cause, TransferError

T = TypeVar("T")

ENGINE_TIMEOUT_S: Final = 300.0
"""How long a call may wait for the engine's thread, which answers after its step."""


class EngineCalls:
    """A queue of calls. Any thread submits; the engine's thread runs them between its steps."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = Lock()
        self._is_closed = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._finalizer = finalize(self, os.close, self._fd)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while calls wait."""
        return self._fd

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Queue a call; the future has what it returns or raises. Cancelled once the engine has ended."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            self._queue.append((future, lambda: function(*arguments)))
            os.eventfd_write(self._fd, 1)
        return future

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Queue a call and wait for it.

        Raises:
            TransferError: the call has raised it; or the engine has ended, or does not answer, and the call never runs.
        """
        future = self.submit(function, *arguments)
        try:
            return future.result(ENGINE_TIMEOUT_S)
        except (CancelledError, TimeoutError) as error:
            if not future.cancel():  # it has just begun
                return future.result()
            raise TransferError(Cause.GONE, "the engine has ended, or does not answer") from error

    def run(self) -> None:
        """Run the calls that wait. Errors of a transfer go to the caller; others end the engine."""
        with self._lock:
            if not self._queue:
                return
            waiting, self._queue = self._queue, deque()
            with suppress(BlockingIOError):  # no call has come since the last time
                os.eventfd_read(self._fd)
        for future, call in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except TransferError as error:
                future.set_exception(error)

    def close(self) -> None:
        """Cancel what waits, and all later calls."""
        with self._lock:
            self._is_closed = True
            waiting, self._queue = self._queue, deque()
        for future, _ in waiting:
            future.cancel()
