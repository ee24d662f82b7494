"""Signs of life of the engine's process, in memory that it shares with the HTTP process.

Two times by ``time.monotonic``, which is the same in all processes. A thread of the engine's process stores the first
once a second, also during a long step or while a kernel is compiled: it stays behind only if the process is stopped or
starved. The engine's loop stores the second.
"""

import mmap
import os
from time import monotonic
from typing import Final

BEAT_INTERVAL_S: Final = 1.0
MAX_SILENCE_S: Final = 15.0
"""A process without a beat for longer hangs."""
MAX_TURN_S: Final = 600.0
"""A loop that has been busy with one step for longer hangs. A prefill on a slow CPU may take minutes."""
SIZE: Final = 16


class Heartbeat:
    """The shared times.

    Args:
        fd: a file in memory; may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, SIZE)
        self._times = memoryview(mmap.mmap(fd, SIZE)).cast("d")

    def beat(self) -> None:
        """Store that the process runs."""
        self._times[0] = monotonic()

    def begin_turn(self) -> None:
        """Store that the engine's loop begins to work: on messages, then on a step."""
        self._times[1] = monotonic()

    def end_turn(self) -> None:
        """Store that the engine's loop waits for messages."""
        self._times[1] = 0.0

    def find_hang(self) -> str | None:
        """Return why the engine is considered hung; None if it is not."""
        now_s = monotonic()
        last_beat_s, turn_s = self._times
        if now_s - last_beat_s > MAX_SILENCE_S:
            return f"its process has shown no sign of life for {now_s - last_beat_s:.0f} s"
        if turn_s and now_s - turn_s > MAX_TURN_S:
            return f"its current step has taken {now_s - turn_s:.0f} s so far"
        return None
