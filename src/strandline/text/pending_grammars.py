"""Sequences whose grammar is being compiled, in threads beside the core's steps."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.sampling_params import StructuredOutputsParams

NUM_THREADS: Final = 2
"""More than one, so that a slow grammar does not delay all others."""


class PendingGrammars:
    """Holds sequences until their grammars are compiled. Only the compilation runs in other threads."""

    def __init__(self, compile_grammar: Callable[[StructuredOutputsParams], object]) -> None:
        """
        Args:
            compile_grammar: returns what keeps the compiled grammar (``Executor.compile_grammar``); threads call it.
        """
        self._compile_grammar = compile_grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._waiting: dict[RequestId, tuple[Submission, Future[object]]] = {}
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._waiting)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when ``take`` may return something."""
        return self._done

    def put(self, submission: Submission) -> None:
        """Start compiling a sequence's grammar."""
        structure = submission.new.params.structured_outputs
        if structure is None:
            raise ValueError(f"sequence {submission.new.request_id!r} has no grammar")
        future = self._threads.submit(self._compile_grammar, structure)
        self._waiting[submission.new.request_id] = submission, future
        future.add_done_callback(lambda _: os.eventfd_write(self._done, 1))

    def take(self) -> list[tuple[Submission, object]]:
        """Return the sequences whose grammars are compiled by now, each with what keeps its grammar compiled.

        Raises what compiling one raised.
        """
        os.eventfd_read(self._done)
        ready = [name for name, (_, future) in self._waiting.items() if future.done()]
        taken = [self._waiting.pop(name) for name in ready]
        return [(submission, future.result()) for submission, future in taken]

    def discard(self, request_id: RequestId) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            found[1].cancel()

    def close(self) -> None:
        """Wait for running compilations, drop the others and end the threads."""
        self._waiting.clear()
        self._threads.shutdown(cancel_futures=True)
        os.close(self._done)
