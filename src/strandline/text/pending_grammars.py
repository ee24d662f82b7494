"""Sequences whose grammar is being compiled, in threads, while the core runs steps."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Lock

from strandline.errors import RequestError
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.sampling_params import StructuredOutputsParams
from strandline.text.compiling_threads import CompilingThreads


class PendingGrammars:
    """Holds sequences until their grammars are compiled. Only the compilation runs in other threads."""

    def __init__(self, compile_grammar: Callable[[StructuredOutputsParams], object]) -> None:
        """
        Args:
            compile_grammar: returns an object that keeps the compiled grammar (``Executor.compile_grammar``); called in
                threads.
        """
        self._compile_grammar = compile_grammar
        self._threads = CompilingThreads()
        self._waiting: dict[RequestId, tuple[Submission, Future[object]]] = {}
        self._done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Submission]:
        """Yield the sequences."""
        return (submission for submission, _ in self._waiting.values())

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
        future.add_done_callback(self._wake)

    def take(self) -> list[tuple[Submission, object | RequestError]]:
        """Return the sequences whose grammars have been compiled, each with the object that keeps its grammar.

        A sequence whose grammar cannot be compiled is returned with the error. Other errors are raised.
        """
        os.eventfd_read(self._done)
        ready = [name for name, (_, future) in self._waiting.items() if future.done()]
        taken = [self._waiting.pop(name) for name in ready]
        return [(submission, _result(future)) for submission, future in taken]

    def discard(self, request_id: RequestId) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        found = self._waiting.pop(request_id, None)
        if found is not None:
            found[1].cancel()

    def close(self) -> None:
        """Drop all sequences, without waiting for running compilations."""
        self._waiting.clear()
        self._threads.close()
        with self._lock:
            self._is_closed = True
            os.close(self._done)

    def _wake(self, _: object) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._done, 1)


def _result(future: Future[object]) -> object | RequestError:
    try:
        return future.result()
    except RequestError as error:
        return error
