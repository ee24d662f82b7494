"""The listening socket."""

import asyncio
import errno
import logging
import resource
import socket
from time import monotonic
from typing import Any, Final

LOGGER: Final = logging.getLogger("strandline.server")
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})
PAUSE_S: Final = 0.5
"""Shorter than the second after which asyncio tries again."""
LOG_INTERVAL_S: Final = 60.0


class Listener(socket.socket):
    """A listening socket from which asyncio accepts once a second while no file descriptors are free.

    By default, when ``accept`` fails this way, asyncio makes as many attempts as the length of the backlog, each with a
    traceback and a timer for as many more (cpython issue 151615).
    """

    _paused_until_s = 0.0
    _log_again_at_s = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        now_s = monotonic()
        if now_s < self._paused_until_s:
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._paused_until_s = now_s + PAUSE_S
                if now_s >= self._log_again_at_s:
                    self._log_again_at_s = now_s + LOG_INTERVAL_S
                    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                    LOGGER.warning(
                        "no file descriptor is free for another connection (%s): new clients wait until others "
                        "disconnect; the limit is %d, raise it with ulimit -n, or lower --client-timeout-s",
                        error.strerror,
                        max_files,
                    )
            raise


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an event loop's errors as by default, except those already logged by a listener."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context):
        loop.default_exception_handler(context)
