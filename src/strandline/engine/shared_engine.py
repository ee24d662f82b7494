"""An engine that several calls use, from several threads or inside each other.

One thread uses it at a time. A step runs the requests of all calls; what it has for another call waits in the inbox of
that one.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any

from strandline.engine.engine import Engine
from strandline.engine.interrupts import uninterrupted
from strandline.errors import EngineError
from strandline.records.outputs import RequestOutput
from strandline.text.frontend import CheckedRequest

Inbox = dict[str, RequestOutput]
"""The latest outputs of the requests of one call, by their names, until it takes them."""


class SharedEngine:
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self.process = os.getpid()
        self._engine = engine
        self._lock = RLock()
        self._inboxes: dict[str, Inbox] = {}
        """Where the outputs of each request that runs go, by its name."""
        self._is_used = False
        self._ended: list[str] = []
        """Requests to be ended at the end of a use: garbage collection may close a stream at any moment of one."""

    def require_own_process(self) -> None:
        """Raise an EngineError if this process was forked from the engine's."""
        if self.process != os.getpid():
            raise EngineError(
                f"this LLM was made in process {self.process}, from which process {os.getpid()} was forked: neither "
                "its threads nor the device are here; make an LLM in each process, and start them with 'spawn'"
            )

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Use the engine in one thread at a time.

        Raises:
            EngineError: this process was forked from the engine's.
        """
        self.require_own_process()
        with self._lock:
            was_used = self._is_used
            try:
                self._is_used = True
                yield
            finally:
                try:
                    if self._ended and not was_used:
                        self._abort_ended()
                finally:
                    self._is_used = was_used

    def add(self, name: str, request: CheckedRequest, stack: ExitStack, inbox: Inbox, **options: Any) -> None:
        """Add a request of a call. It is aborted when the stack unwinds before it has finished.

        Args:
            options: as in ``Engine.add_checked``.
        """
        with uninterrupted():
            self._engine.add_checked(name, request, **options)
            self._inboxes[name] = inbox
            stack.callback(self._end, name)

    def step(self, inbox: Inbox) -> list[RequestOutput]:
        """Return what is new of a call's requests; if nothing is, run a step first.

        Steps of other calls extend the outputs: they are read, or copied, in the same ``exclusively``.

        Raises:
            RequestError: another call has put the engine to sleep.
            EngineError: another call has closed it.
        """
        with self.exclusively(), uninterrupted():
            if not inbox:
                self._engine.core.require_open()
                self._engine.core.control.require_running()
                for output in self._engine.step():
                    if (its := self._inboxes.get(output.request_id)) is not None:
                        its[output.request_id] = output
            found = list(inbox.values())
            inbox.clear()
            return found

    def _end(self, name: str) -> None:
        """Forget a request, and abort it if it has not finished; in a forked process, do nothing."""
        if self.process == os.getpid():
            self._ended.append(name)
            with self.exclusively():
                pass

    def _abort_ended(self) -> None:
        with uninterrupted():
            while self._ended:
                name = self._ended.pop()
                del self._inboxes[name]
                self._engine.abort(name)
