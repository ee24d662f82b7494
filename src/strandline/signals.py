"""Signals that end programs, and processes that ignore them: their parents decide when they end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back in this thread, and in the processes that it starts, until those call ``ignore_signals``.

    Ctrl-C in a terminal reaches them too; while they import modules it would be an error in each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Have this process ignore signals, those held back since its start included."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
