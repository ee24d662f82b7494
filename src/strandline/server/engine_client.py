"""The HTTP process's side of the engine: submission of jobs, their outputs, and detection of failures."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Protocol, Self

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import EngineError, RequestError
from strandline.ids import RequestId
from strandline.records.cache_questions import CacheAnswer, CacheQuestion, CacheState
from strandline.records.events import CoreStats, FinishReason, Limits, StepEvents
from strandline.records.messages import (
    ENCODER,
    FLUSH_S,
    FROM_CORE,
    AskCache,
    AskStats,
    AskWhy,
    CacheShown,
    Died,
    Explained,
    Finish,
    Flush,
    Flushed,
    FlushReport,
    Stats,
    Stepped,
    Submit,
    ToCore,
)
from strandline.records.outputs import RequestDelta
from strandline.records.transfer_params import TransferParams
from strandline.server.metrics import Metrics
from strandline.text.frontend import CheckedParams, Frontend
from strandline.text.output_streams import RequestStream
from strandline.text.prompts import check_text

ANSWER_TIMEOUT_S: Final = 5.0
STATS_TIMEOUT_S: Final = 2.0
"""Shorter, since Prometheus gives up after 10 s by default."""


class EngineDeadError(EngineError):
    """The engine process has exited."""


class QueueFullError(RequestError):
    """Too many requests are queued."""


class NoTokenError(EngineError):
    """No token could be sampled for a request."""


class OutputFailedError(EngineError):
    """An exception ended a single output."""


class RequestTimeoutError(EngineError):
    """The request took longer than the server allows."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the engine."""

    token_ids: list[int]
    text: str | None = None
    marks: tuple[int, ...] = ()
    """Token positions where a snapshot is requested."""


class Job:
    """One HTTP request: prompts with the same parameters. Leaving its context aborts what is unfinished."""

    def __init__(self, client: "EngineClient", streams: Sequence[RequestStream], timeout_s: float | None) -> None:
        self.streams = list(streams)
        """One per prompt."""
        self._client = client
        self._places = {stream.request_id: place for place, stream in enumerate(streams)}
        self._changed = asyncio.Event()
        self._dirty: dict[str, None] = {}
        self._failure: str | None = None
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close(self)

    def note(self, request_id: str) -> None:
        """Record that a request has new output."""
        self._dirty[request_id] = None
        self._changed.set()

    def fail(self, reason: str) -> None:
        """Fail the job: the engine has exited."""
        self._failure = reason
        self._changed.set()

    async def deltas(self) -> AsyncIterator[tuple[int, RequestDelta]]:
        """Yield each prompt's index and the new output of its sequences, as it arrives, until all are finished.

        Raises:
            EngineDeadError: the engine has exited.
            RequestTimeoutError: the job has timed out.
            NoTokenError: an output ended because no token could be sampled.
            OutputFailedError: an output ended by an exception.
        """
        num_unfinished = len(self.streams)
        while num_unfinished:
            await self._wait()
            dirty, self._dirty = self._dirty, {}
            for request_id in dirty:
                place = self._places[request_id]
                delta = _checked(self.streams[place].take())
                num_unfinished -= delta.finished
                yield place, delta

    async def whole(self) -> list[RequestDelta]:
        """Wait for all outputs and return them, one delta per prompt. Raises as ``deltas``."""
        while not self.is_finished:
            await self._wait()
        return [_checked(stream.take()) for stream in self.streams]

    @property
    def is_finished(self) -> bool:
        return all(stream.is_finished for stream in self.streams)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._changed.wait()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"the request took longer than {self._timeout_s:g} s; ask for fewer tokens or raise --request-timeout-s"
            ) from error
        self._changed.clear()
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}")


def _checked(delta: RequestDelta) -> RequestDelta:
    for output in delta.outputs:
        if output.finish_reason != FinishReason.ERROR:
            continue
        if output.stop_reason is not None:
            raise OutputFailedError(f"the output has failed and cannot be continued: {output.stop_reason}")
        raise NoTokenError(
            "no token could be sampled, as the logits have no finite maximum: every token is banned, a parameter is "
            "too extreme for this model, its grammar has become too complex, or the model's weights produce NaN"
        )
    return delta


class CoreSocket(Protocol):
    """A socket for messages to and from an engine."""

    def send(self, data: bytes) -> object:
        """Queue a message."""

    def recv(self) -> Awaitable[bytes]:
        """Return the next message from the engine."""


class HangDetector(Protocol):
    """Detects whether an engine hangs."""

    def find_hang(self) -> str | None:
        """Return why the engine is considered hung; None if it is not."""


class EngineClient:
    """Client of the engine process: submits jobs, and receives their outputs and the engine's state.

    Args:
        socket: connected to an engine that is ready.
        heartbeat: detects whether the engine hangs.
        frontend: turns requests into sequences and tokens into text.
        max_unfinished: maximum number of sequences that run or are queued; more are rejected.
        timeout_s: time limit of a job.
        advice: text added to errors after the engine has exited.
    """

    def __init__(
        self,
        socket: CoreSocket,
        frontend: Frontend,
        metrics: Metrics,
        *,
        heartbeat: HangDetector,
        max_unfinished: int,
        timeout_s: float | None = None,
        advice: str = "restart the server",
    ) -> None:
        self.frontend = frontend
        self.metrics = metrics
        self.failure: str | None = None
        """Why the engine has exited; None while it runs."""
        self.num_jobs_failed = 0
        """Jobs that were unfinished when the engine exited, since the start."""
        self._advice = advice
        self._socket = socket
        self._heartbeat = heartbeat
        self._max_unfinished = max_unfinished
        self._timeout_s = timeout_s
        self._jobs: dict[str, Job] = {}
        self._stats_wanted: list[asyncio.Future[CoreStats]] = []
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0
        self._num_expected = 0

    # Jobs

    def submit(
        self,
        name: str,
        prompts: Sequence[Prompt],
        params: CheckedParams,
        salt: str = "",
        transfer: TransferParams | None = None,
    ) -> Job:
        """Start a job.

        Args:
            transfer: transfer of the prompts to or from another engine.

        Raises:
            RequestError: a prompt cannot be served; then none is run.
            QueueFullError: too many sequences are queued.
            EngineDeadError: the engine has exited.
        """
        self.require_running()
        wanted = params.params
        self.require_room(len(prompts) * wanted.n)
        for text in (salt, *wanted.stop_strings, *(wanted.bad_words or ())):
            check_text(text)
        requests = [self.frontend.check(prompt.token_ids, params) for prompt in prompts]
        submissions = []
        names = [f"{name}-{place}" for place in range(len(prompts))]
        for request_id, request, prompt in zip(names, requests, prompts, strict=True):
            submissions += self.frontend.open(
                request_id, request, prompt=prompt.text, salt=salt, marks=prompt.marks, transfer=transfer
            )
        try:
            self._send(Submit(submissions))
        except RequestError:
            for request_id in names:
                self.frontend.close(request_id)
            raise
        job = Job(self, [self.frontend.requests[request_id] for request_id in names], self._timeout_s)
        self._jobs.update(dict.fromkeys(names, job))
        return job

    @contextmanager
    def expect(self, num_sequences: int) -> Iterator[None]:
        """Reserve room for outputs while their prompt is tokenized and their grammar compiled.

        The room is still free if they are submitted right after, without an await in between.

        Raises: as ``require_room``.
        """
        self.require_room(num_sequences)
        self._num_expected += num_sequences
        try:
            yield
        finally:
            self._num_expected -= num_sequences

    def require_room(self, num_sequences: int) -> None:
        """Raise a RequestError if the sequences exceed the queue's size, a QueueFullError if they do not fit now."""
        limit = self._max_unfinished
        if num_sequences > limit:
            raise RequestError(
                f"the request asks for {num_sequences} outputs (prompts times n), at most {limit} may run and wait; "
                "send several requests, or raise --max-queue"
            )
        num_taken = len(self.frontend) + self._num_expected
        if num_taken + num_sequences > limit:
            raise QueueFullError(
                f"{num_taken} outputs run and wait already, at most {limit} may; try again later, or raise --max-queue"
            )

    def close(self, job: Job) -> None:
        """Abort the unfinished requests of a job, and drop it."""
        names: list[RequestId] = []
        for stream in job.streams:
            self._jobs.pop(stream.request_id, None)
            if not stream.is_finished:
                names += self.frontend.close(stream.request_id)
                self.metrics.forget(stream.request_id)
        if names and self.failure is None:
            self._send(Finish(names))

    # The engine

    def require_running(self) -> None:
        """Raise an EngineDeadError if the engine has exited."""
        if self.failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def fail(self, reason: str) -> None:
        """Mark the engine as exited and fail all jobs. The first reason is kept."""
        if self.failure is not None:
            return
        self.failure = f"{reason}; {self._advice}"
        jobs = set(self._jobs.values())
        self.num_jobs_failed += sum(not job.is_finished for job in jobs)
        for job in jobs:
            job.fail(self.failure)
        for future in (*self._stats_wanted, *self._questions.values()):
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        self._stats_wanted.clear()

    def find_hang(self) -> str | None:
        """Return why the engine is considered hung; None if it is not, or has exited."""
        return self._heartbeat.find_hang() if self.failure is None else None

    def reconnect(self, socket: CoreSocket, limits: Limits, heartbeat: HangDetector) -> None:
        """Use a new engine process; all jobs of the old one have failed."""
        self._socket = socket
        self._heartbeat = heartbeat
        self.frontend.limits = limits
        self.failure = None

    async def ask_stats(self) -> CoreStats:
        """Return the engine's state. Requests that are being prepared count as queued.

        Raises:
            EngineDeadError: it has exited.
            RequestTimeoutError: it does not respond.
        """
        self._require_answers()
        future = asyncio.get_running_loop().create_future()
        self._stats_wanted.append(future)
        try:
            self._send(AskStats())
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats: CoreStats = await future
                return replace(stats, num_waiting=stats.num_waiting + self._num_expected)
        except TimeoutError as error:
            raise RequestTimeoutError(f"the engine has not answered for {STATS_TIMEOUT_S:g} s") from error
        finally:
            if future in self._stats_wanted:
                self._stats_wanted.remove(future)

    def _require_answers(self) -> None:
        self.require_running()
        hang = self.find_hang()
        if hang is not None:
            raise RequestTimeoutError(f"the engine does not answer: {hang}")

    async def show_cache(self, salt: str) -> CacheState:
        """Return the cache's content under a salt. Raises as ``ask_stats``."""
        state: CacheState = await self._ask(lambda number: AskCache(number, salt))
        return state

    async def explain(self, question: CacheQuestion) -> CacheAnswer:
        """Return why a request missed, or what a prompt would hit. Raises as ``ask_stats``."""
        answer: CacheAnswer = await self._ask(lambda number: AskWhy(number, question))
        return answer

    async def flush(self) -> FlushReport | None:
        """Have the engine write entries that are only in memory to the disk cache; it accepts no more requests.

        Raises as ``ask_stats``.
        """
        report: FlushReport | None = await self._ask(Flush, FLUSH_S + ANSWER_TIMEOUT_S)
        return report

    async def _ask(self, message: Callable[[int], ToCore], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        self._require_answers()
        self._num_questions += 1
        number = self._num_questions
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(message(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise RequestTimeoutError(f"the engine has not answered for {timeout_s:g} s") from error
        finally:
            del self._questions[number]

    async def receive(self) -> None:
        """Receive the engine's messages until cancelled."""
        while True:
            message = FROM_CORE.decode(await self._socket.recv())
            match message:
                case Stepped(events):
                    self._receive_events(events)
                case Stats(stats):
                    for future in self._stats_wanted:
                        if not future.done():
                            future.set_result(stats)
                    self._stats_wanted.clear()
                case CacheShown(number, found) | Explained(number, found) | Flushed(number, found):
                    asked = self._questions.get(number)
                    if asked is not None and not asked.done():
                        asked.set_result(found)
                case Died(reason):
                    self.fail(reason)

    def _receive_events(self, events: StepEvents) -> None:
        streams, stopped = self.frontend.take(events)
        if stopped:
            self._send(Finish(stopped))
        now = SYSTEM_CLOCK()
        for stream in streams:
            self.metrics.observe(stream, now)
            self._jobs[stream.request_id].note(stream.request_id)

    def _send(self, message: ToCore) -> None:
        try:
            data = ENCODER.encode(message)
        except UnicodeEncodeError as error:
            raise RequestError(f"the request has a text that is not valid Unicode: {error.reason}") from error
        self._socket.send(data)
