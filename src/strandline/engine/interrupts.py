"""Ctrl-C between steps: an interrupt inside one would leave requests, cache and device in different states."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay the first Ctrl-C until the end; a second one acts at once.

    Only Python's own handlers are delayed, and only in the main thread, where they run.
    """
    given: Any = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(given):
        yield
        return
    delayed: list[tuple[int, FrameType | None]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if delayed:
            delayed.clear()
            given(number, frame)
        else:
            delayed.append((number, frame))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, given)
        for number, frame in delayed:
            given(number, frame)
