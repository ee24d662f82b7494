"""An engine's process from its start on: it imports what loads a model, and waits for the engine's configuration.

Importing this module loads neither the web framework nor a tokenizer: a server spawns its engines before it does.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self

from strandline.records.heartbeat import Heartbeat
from strandline.signals import signals_held

COMMAND: Final = [sys.executable, "-m", "strandline.engine.processes.core_process"]


class SpawnedEngine:
    """An engine's process, its heartbeat, and the address at which it looks for the HTTP process.

    Leave its context to end the process, if it has not ended.
    """

    def __init__(self, num_workers: int, inherited: Sequence[int] = ()) -> None:
        """Spawn the process.

        Args:
            num_workers: see ``EngineConfig.num_workers``.
            inherited: file descriptors that the process keeps open.

        Raises:
            OSError: the system lacks a resource, such as file descriptors.
        """
        # Readable by this user alone.
        self.folder = TemporaryDirectory(prefix="strandline-", ignore_cleanup_errors=True)
        self.address = f"ipc://{self.folder.name}/core"
        with ExitStack() as failed:
            failed.callback(self.folder.cleanup)
            fd = os.memfd_create("heartbeat")
            try:
                self.heartbeat = Heartbeat(fd)
                command = [*COMMAND, self.address, str(fd), str(num_workers)]
                with signals_held():
                    self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[fd, *inherited])
                    failed.callback(self.end)  # signals that were held arrive as these are released
            finally:
                os.close(fd)
            failed.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the process, if it has not ended, and remove its files. A second call does nothing."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()
