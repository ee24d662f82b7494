"""The worker processes of an engine: one for each rank, which all get the same calls.

If a rank ends, fails or hangs, the others wait for it in vain: all are killed, and the error names that rank and its
last words.

This module loads no tensor library, so that the processes can begin before this one loads one.
"""

import pickle
import re
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from strandline.config import EngineConfig
from strandline.device.ranks.rendezvous import Rendezvous
from strandline.engine.workers.worker_link import Call, Start, WorkerEndedError, WorkerLink
from strandline.errors import CacheInvariantError, ConfigError, EngineError, OutOfMemoryError, RequestError

if TYPE_CHECKING:
    from strandline.device.executor import ExecutorFacts

GRACE_S: Final = 2.0
"""How long the others may fail before the rank that has ended is found out."""

STACK_S: Final = 1.0
"""How long a rank may take to say what it is doing."""

WAITS_FOR_OTHERS: Final = b"distributed_c10d.py"
"""What the stack of a rank contains that waits for others."""

TIMED_OUT: Final = re.compile("Timed out waiting|Wait timeout")
"""What the error of a rank contains for which gloo, or the rendezvous, has waited too long for another."""

SHARED_ERRORS: Final = (ConfigError, OutOfMemoryError, RequestError, CacheInvariantError)
"""Errors that every rank raises alike, and that say all."""


class Workers:
    """The processes, and the directory where they meet.

    Attributes:
        directory: None: they have not been started, or a single process meets no other.
    """

    def __init__(self, num_ranks: int) -> None:
        self.directory: str | None = None
        self._links = list[WorkerLink]()
        self._numbers = count()
        self._released: deque[int] = deque()
        """Calls whose results the ranks need not keep."""
        self._failure: str | None = None
        try:
            for _ in range(num_ranks):
                self._links.append(WorkerLink())
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks."""
        return [link.process.pid for link in self._links]

    @property
    def fds(self) -> list[int]:
        """A descriptor for each rank that becomes readable when its process has ended."""
        return [link.process_fd for link in self._links]

    def check(self) -> None:
        """Raise what ``results`` raises if a rank has ended."""
        futures = [Future[Any]() for _ in self._links]
        for link, future in zip(self._links, futures, strict=True):
            if link.describe_end() is None:
                future.set_result(None)
            else:
                future.set_exception(link.ended_error())
        self.results(futures)

    def start(self, config: EngineConfig, weights: str, *, progress: bool) -> "list[ExecutorFacts]":
        """Have all load the model, and wait for that; return what each has. Raises what loading raises.

        Args:
            weights: as in ``Start``.
        """
        number = next(self._numbers)
        if len(self._links) > 1:
            self.directory = tempfile.mkdtemp(prefix="strandline-ranks-")
        starts = [
            Start(number, config, progress and rank == 0, self._rendezvous(rank), weights)
            for rank in range(len(self._links))
        ]
        try:
            return self.results(self._send(number, [_pickled(start) for start in starts]), what="its start")
        except BaseException:
            self.kill()
            raise

    def _rendezvous(self, rank: int) -> Rendezvous | None:
        if self.directory is None:
            return None
        return Rendezvous(rank, len(self._links), str(Path(self.directory) / "meeting"))

    def call(self, method: str, *arguments: Any) -> tuple[int, list[Future[Any]]]:
        """Call a method on all ranks; return the call's number and what each will return or raise."""
        number = next(self._numbers)
        message = _pickled(Call(number, method, arguments, self._take_released()))
        return number, self._send(number, [message] * len(self._links))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """Call a method on all ranks, on each with arguments of its own; return what each will return or raise."""
        number, released = next(self._numbers), self._take_released()
        return self._send(number, [_pickled(Call(number, method, own, released)) for own in arguments])

    def release(self, number: int) -> None:
        """Let the ranks drop the results of a call, with the next call: a finalizer must not wait for a lock."""
        self._released.append(number)

    def _take_released(self) -> tuple[int, ...]:
        released = list[int]()
        with suppress(IndexError):  # other threads take some, too
            while True:
                released.append(self._released.popleft())
        return tuple(released)

    def _send(self, number: int, messages: Sequence[bytes]) -> list[Future[Any]]:
        if self._failure is not None:
            raise EngineError(self._failure)
        return [link.send(number, message) for link, message in zip(self._links, messages, strict=True)]

    def results(
        self, futures: Sequence[Future[Any]], timeout_s: float | None = None, what: str = "a call"
    ) -> list[Any]:
        """Wait for all ranks' results.

        Args:
            timeout_s: how long they may take; None: for ever.
            what: what the ranks are doing, for messages.

        Raises:
            EngineError: a rank has ended, failed or not answered in time. No rank is left, then.
        """
        _, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
        errors = {
            rank: error
            for rank, future in enumerate(futures)
            if future not in pending and (error := future.exception()) is not None
        }
        if not errors and not pending:
            return [future.result() for future in futures]
        for error in errors.values():
            if isinstance(error, SHARED_ERRORS) or len(futures) == 1:
                raise error
        cause = next(iter(errors.values()), None)
        self._failure = self._find_failure(futures, errors, f"{what} within {timeout_s:g} s" if timeout_s else what)
        self.kill()
        raise EngineError(self._failure) from cause

    def _find_failure(self, futures: Sequence[Future[Any]], errors: dict[int, BaseException], unfinished: str) -> str:
        """Describe the failure that all others follow from; ``errors`` are the first ones.

        Args:
            unfinished: what ranks that hang have not finished.
        """
        if all(TIMED_OUT.search(str(error)) for error in errors.values()):
            rank = self._find_hanging([rank for rank, future in enumerate(futures) if not future.done()])
            if rank is not None or not errors:
                rank = rank or 0
                return f"{self._name(rank)} has not finished {unfinished}{self._last_words(rank)}"
        deadline = time.monotonic() + GRACE_S
        rank, how = next(iter(errors)), ""
        while True:
            ends = {rank: end for rank, link in enumerate(self._links) if (end := link.describe_end()) is not None}
            if ends:
                replied = {each for each in ends if _has_raised(futures[each])}
                # One that was killed, or has ended without a word, rather than one that lost another.
                rank = min(ends, key=lambda x: ("exit code" in ends[x], x in replied, x not in errors, x))
                how = "" if rank in replied else ends[rank]
            if ends or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        how = how or f"failed: {futures[rank].exception()}"
        return f"{self._name(rank)} has {how}{self._last_words(rank)}"

    def _find_hanging(self, ranks: Sequence[int]) -> int | None:
        """Ask ranks for their stacks; return the first that does not wait for another, or does not answer."""
        for rank in ranks:
            self._links[rank].last_words = b""
            with suppress(ProcessLookupError):
                self._links[rank].process.send_signal(signal.SIGUSR1)
        time.sleep(STACK_S)
        return next((rank for rank in ranks if WAITS_FOR_OTHERS not in self._links[rank].last_words), None)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self._links)} (process {self._links[rank].process.pid})"

    def _last_words(self, rank: int) -> str:
        words = self._links[rank].last_words.decode(errors="replace").strip()
        return f"; its last words:\n{words}" if words else "; it has said nothing"

    def kill(self) -> None:
        """Kill all ranks; ``close`` waits for their end."""
        for link in self._links:
            link.process.kill()
        self._remove_directory()  # at once: this process may be killed next

    def _remove_directory(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """End all ranks, and wait for their end. A second call does nothing."""
        for link in self._links:
            link.hang_up()
        for link in self._links:
            link.close()
        self._remove_directory()


@contextmanager
def spawned_workers(num_workers: int) -> Iterator[Workers | None]:
    """Spawn the processes that steps run in, which then import what they need; end them if the body fails. None: there
    are none, and steps run in this process.
    """
    if not num_workers:
        yield None
        return
    workers = Workers(num_workers)
    try:
        yield workers
    except BaseException:
        workers.kill()
        workers.close()
        raise


def _has_raised(future: Future[Any]) -> bool:
    """Whether a rank has replied to a call with an error."""
    return future.done() and not isinstance(future.exception(), WorkerEndedError | None)


def _pickled(message: Start | Call) -> bytes:
    """Return a message's bytes, before any of it is sent: an error leaves the connections as they were."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
