"""The HTTP process's side of its engines: where each prompt runs, its outputs, and what follows from failures."""

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from strandline.clock import SYSTEM_CLOCK
from strandline.errors import EngineError, RequestError
from strandline.ids import RequestId
from strandline.records.adapters import LoadedAdapter
from strandline.records.cache_questions import CacheAnswer, CacheQuestion
from strandline.records.events import CoreStats, Limits, StepEvents, Submission
from strandline.records.messages import (
    AskPictures,
    CacheChanged,
    Control,
    Died,
    Finish,
    FlushReport,
    LoadAdapter,
    SendPictures,
    Stepped,
    UnloadAdapter,
)
from strandline.records.transfer_params import TransferParams
from strandline.server.engines.engine_link import CoreSocket, EngineLink, HangDetector, encode
from strandline.server.engines.engine_router import EngineRouter
from strandline.server.engines.engine_state import EngineState
from strandline.server.engines.engine_weights import EngineWeights, StaleWeightsError, Weights
from strandline.server.engines.jobs import Job
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.server.engines.request_observers import RequestObserver
from strandline.server.engines.tenants import CURRENT_TENANT, KEYLESS, Tenant
from strandline.text.frontend import CheckedParams, CheckedRequest, Frontend
from strandline.text.output_streams import RequestStream
from strandline.text.prompts import check_texts

LOGGER: Final = logging.getLogger(__name__)
MAX_PIXEL_BYTES: Final = 8 * 2**30
"""Memory of the pictures of all unfinished requests, as an engine reads them."""


class PausedError(EngineError):
    """The server accepts no requests for now."""


class QueueFullError(RequestError):
    """Too many requests are queued."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt under way. Its sequences run on one engine."""

    job: Job
    engine: EngineLink
    tenant: Tenant
    prompt: Prompt
    """With its pictures, for which the engine may ask while it is unfinished."""


class EngineClient:
    """Client of the engines: submits jobs, and receives their outputs and the engines' state.

    Args:
        engines: in the order of their numbers.
        frontend: turns requests into sequences and tokens into text.
        max_unfinished: maximum number of sequences that run or are queued; more are rejected.
        timeout_s: time limit of a job.
        stream_interval: tokens of an output that a stream sends together.
        router: chooses among several engines; None: there is one.
        observers: follow all requests.
    """

    def __init__(
        self,
        engines: Sequence[EngineLink],
        frontend: Frontend,
        metrics: Metrics,
        *,
        max_unfinished: int,
        timeout_s: float | None = None,
        stream_interval: int = 1,
        router: EngineRouter | None = None,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.engines = engines
        self.frontend = frontend
        self.metrics = metrics
        self.num_jobs_failed = 0
        """Jobs that were unfinished when an engine that ran them exited, since the start."""
        self._router = router
        self._observers = observers
        self._max_unfinished = max_unfinished
        self._timeout_s, self._stream_interval = timeout_s, stream_interval
        self._requests: dict[str, _Request] = {}
        self._adapters = dict[str, LoadedAdapter]()
        """LoRA adapters that were loaded since the start, by their digests."""
        self._num_expected = 0
        self.refusal: str | None = None
        """Why requests are refused; None: they are not."""
        self.state = EngineState()
        self.weights = EngineWeights(len(engines))

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
            EngineDeadError: all engines have exited.
        """
        self.require_running()
        if self.refusal is not None:
            raise PausedError(self.refusal)
        if not any(self._may_answer(engine) for engine in self.engines):
            raise StaleWeightsError(self.weights.why_stale())
        wanted = params.params
        self.require_room(len(prompts) * wanted.n)
        check_texts(cache_salt=[salt], stop=wanted.stop_strings, bad_words=wanted.bad_words or ())
        self._require_room_for_pictures(sum(prompt.num_pixel_bytes for prompt in prompts))
        requests = [self.frontend.check(prompt.token_ids, params, prompt.pictures) for prompt in prompts]
        tenant = CURRENT_TENANT.get()
        tenant.take_prompt(sum(len(request.prompt_ids) for request in requests))
        submissions = []
        names = [f"{name}-{index}" for index in range(len(prompts))]
        for request_id, request, prompt in zip(names, requests, prompts, strict=True):
            submissions.append(
                self.frontend.open(
                    request_id,
                    request,
                    prompt=prompt.text,
                    salt=salt,
                    marks=prompt.marks,
                    transfer=transfer,
                    recollection=prompt.recollection,
                )
            )
        if tenant is not KEYLESS:
            submissions = [[replace(x, tenant=tenant.id, weight=tenant.weight) for x in each] for each in submissions]
        engines = [self._choose(each, request, salt) for each, request in zip(names, requests, strict=True)]
        try:
            self._send_all(engines, submissions)
        except RequestError:
            for request_id in names:
                self.frontend.close(request_id)
                self._release(request_id)
            raise
        streams = [self.frontend.requests[request_id] for request_id in names]
        job = Job(self.close, streams, self._timeout_s, self._stream_interval)
        for each, engine, prompt in zip(names, engines, prompts, strict=True):
            self._requests[each] = _Request(job, engine, tenant, prompt)
        for observer in self._observers:
            for stream in streams:
                observer.begin(stream)
        return job

    def _choose(self, request_id: str, request: CheckedRequest, salt: str) -> EngineLink:
        """Return the engine for a prompt."""
        if self._router is None:
            return self.engines[0]
        return self.engines[self._router.route(request_id, request.cached_ids, salt, self._hung())]

    def _hung(self) -> set[int]:
        """Return the numbers of the engines that hang; none if no other one responds that may answer requests."""
        hung = {engine.number for engine in self.engines if engine.find_hang() is not None}
        answering = {engine.number for engine in self.engines if self._may_answer(engine)}
        return hung if answering - hung else set()

    def _send_all(self, engines: Sequence[EngineLink], submissions: Sequence[list[Submission]]) -> None:
        """Send each engine its sequences in one message."""
        parts: dict[int, list[Submission]] = {}
        for engine, sequences in zip(engines, submissions, strict=True):
            parts.setdefault(engine.number, []).extend(sequences)
        messages = {number: self.engines[number].encode_submit(sequences) for number, sequences in parts.items()}
        for number, message in messages.items():
            self.engines[number].send(message)

    def _release(self, request_id: str) -> None:
        """Let the router count a request no longer."""
        if self._router is not None:
            self._router.finish(request_id)

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
        num_taken = self.num_unfinished - self._num_stuck()
        if num_taken + num_sequences > limit:
            raise QueueFullError(
                f"{num_taken} outputs run and wait already, at most {limit} may; try again later, or raise --max-queue"
            )
        tenant, num_free = CURRENT_TENANT.get(), limit - num_taken
        if tenant.has_peers and (own := self._num_unfinished_of(tenant)) and own + num_sequences > num_free:
            raise QueueFullError(
                f"{own} outputs of this API key run and wait already, and {num_free} more may; a key takes at most as "
                "many as it leaves to others: try again later, or raise --max-queue"
            )

    def _num_unfinished_of(self, tenant: Tenant) -> int:
        """Return how many outputs of a tenant run or wait."""
        streams = (self.frontend.requests.get(name) for name, x in self._requests.items() if x.tenant is tenant)
        return sum(stream.num_unfinished for stream in streams if stream is not None)

    @property
    def num_unfinished(self) -> int:
        """Outputs that run, wait, or are being prepared."""
        return len(self.frontend) + self._num_expected

    def _require_room_for_pictures(self, num_bytes: int) -> None:
        """Raise a QueueFullError if the pictures of unfinished requests would take too much memory."""
        if not num_bytes:
            return
        num_taken = sum(request.prompt.num_pixel_bytes for request in self._requests.values())
        if num_taken and num_taken + num_bytes > MAX_PIXEL_BYTES:
            raise QueueFullError(
                f"the pictures of requests that run and wait take {num_taken:,} bytes, and these {num_bytes:,}; "
                f"at most {MAX_PIXEL_BYTES:,} are kept: try again later"
            )

    def _num_stuck(self) -> int:
        """Return how many sequences are on engines that hang while another one responds."""
        if not (hung := self._hung()):
            return 0
        streams = (self.frontend.requests.get(name) for name, x in self._requests.items() if x.engine.number in hung)
        return sum(not output.is_finished for stream in streams if stream is not None for output in stream.outputs)

    def close(self, job: Job) -> None:
        """Abort the unfinished requests of a job, and drop it."""
        unfinished: dict[int, list[RequestId]] = {}
        for stream in job.streams:
            request = self._requests.pop(stream.request_id, None)
            if request is not None and not stream.is_finished:
                unfinished.setdefault(request.engine.number, []).extend(self.frontend.close(stream.request_id))
                self._observe_abort(stream, request)
        for number, names in unfinished.items():
            self._finish(self.engines[number], names)

    def _may_answer(self, engine: EngineLink) -> bool:
        return engine.failure is None and self.weights.is_current(engine.number)

    def change_weights(self, engines: Sequence[EngineLink], weights: Weights) -> None:
        """Record that engines have changed their weights. The others get no requests until they do."""
        self.weights.change([engine.number for engine in engines], weights)
        self._follow_weights()

    def name_weights(self, version: str) -> None:
        """Rename the weights that requests are answered with."""
        self.weights.rename(version)
        self._follow_weights()

    def version_of(self, stream: RequestStream) -> str:
        """Return what the weights are called that an open request runs with."""
        return self.weights.versions[self._requests[stream.request_id].engine.number]

    def _follow_weights(self) -> None:
        self.metrics.show_weight_versions(self.weights.versions)
        if self._router is not None:
            for engine in self.engines:
                change = self._router.add if self._may_answer(engine) else self._router.remove
                change(engine.number)

    def abort(self, names: Collection[str] | None = None) -> int:
        """End unfinished requests with what they have generated so far; return how many.

        Args:
            names: names that their responses have as ids; None: all.
        """
        found = [
            (name, request)
            for name, request in self._requests.items()
            if name in self.frontend.requests and (names is None or name.rpartition("-")[0] in names)
        ]
        for name, request in found:
            stream = self.frontend.requests[name]
            self._finish(request.engine, self.frontend.abort(name))
            self._observe_abort(stream, request)
            request.job.note(name)
        return len(found)

    def _finish(self, engine: EngineLink, names: list[RequestId]) -> None:
        if names and engine.failure is None:
            engine.send(encode(Finish(names)))

    # The engines

    def require_running(self) -> None:
        """Raise an EngineDeadError if all engines have exited."""
        if all(engine.failure is not None for engine in self.engines):
            self.engines[0].require_running()

    def fail(self, engine: EngineLink, reason: str) -> None:
        """Mark an engine as exited and fail the jobs that it runs. The first reason is kept."""
        if engine.failure is not None:
            return
        engine.fail(reason)
        self.weights.restart(engine.number)
        self._follow_weights()
        jobs = {x.job for name, x in self._requests.items() if x.engine is engine and name in self.frontend.requests}
        self.num_jobs_failed += len(jobs)
        for job in jobs:
            job.fail(f"{engine.name} has stopped: {engine.failure}")

    def fail_hung(self) -> None:
        """Fail the jobs of engines that hang: nothing waits for them any longer."""
        for engine in self.engines:
            if (hang := engine.find_hang()) is not None:
                LOGGER.warning("%s hangs, and its requests are not waited for: %s", engine.name, hang)
                self.fail(engine, f"it hangs: {hang}")

    def reconnect(self, engine: EngineLink, socket: CoreSocket, limits: Limits, heartbeat: HangDetector) -> None:
        """Use a new process of an engine, as paused or asleep as the others; all jobs of the old one have failed."""
        engine.reconnect(socket, limits, heartbeat)
        for action in self.state.actions():
            engine.send(encode(Control(0, action)))
        for adapter in self._adapters.values():
            engine.send(encode(LoadAdapter(0, adapter.name, adapter.path)))
        self.frontend.limits = least_limits(self.engines)
        self._follow_weights()
        if not self._may_answer(engine):
            LOGGER.warning("%s gets no requests: %s", engine.name, self.weights.why_stale())

    @property
    def first_adapters(self) -> tuple[LoadedAdapter, ...]:
        """The LoRA adapters that the engines have loaded at the start."""
        return self.engines[0].limits.adapters

    async def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Have all engines that run read a LoRA adapter; those that are restarted do so, too.

        Raises:
            RequestError: it cannot be served, or was rewritten meanwhile.
            EngineError: an engine does not answer.
        """
        self.require_running()
        running = [engine for engine in self.engines if engine.failure is None]
        results = await asyncio.gather(*(engine.load_adapter(name, path) for engine in running), return_exceptions=True)
        loaded = {each.digest: each for each in results if isinstance(each, LoadedAdapter)}
        failures = [each for each in results if isinstance(each, BaseException)]
        if failures or len(loaded) > 1:
            for digest in loaded.keys() - self._adapters.keys() - {each.digest for each in self.first_adapters}:
                self.unload_adapter(loaded[digest])
            raise next(iter(failures), RequestError(f"{path} was changed while it was read", param="lora_path"))
        self._adapters |= loaded
        return next(iter(loaded.values()))

    def unload_adapter(self, adapter: LoadedAdapter) -> None:
        """Have all engines forget a LoRA adapter once no request uses it."""
        self._adapters.pop(adapter.digest, None)
        for engine in self.engines:
            if engine.failure is None:
                engine.send(encode(UnloadAdapter(adapter.digest)))

    async def ask_stats(self) -> list[CoreStats | None]:
        """Return the state of each engine; None: it has exited or does not respond.

        Requests that are being prepared count as queued on the first engine that answers.
        """
        answers = await asyncio.gather(*(_stats_or_none(engine) for engine in self.engines))
        for number, stats in enumerate(answers):
            if stats is not None:
                answers[number] = replace(stats, num_waiting=stats.num_waiting + self._num_expected)
                break
        return answers

    async def explain(self, question: CacheQuestion, number: int | None = None) -> tuple[int, CacheAnswer]:
        """Return why a request missed, or what a prompt would hit, and the number of the engine that says so.

        Args:
            number: the engine to ask; None: all that run, and the one that knows the request or would hit most answers.

        Raises:
            EngineDeadError: the engine has exited, or all have.
            RequestTimeoutError: none of those asked responds.
        """
        self.require_running()
        asked = [x for x in self.engines if (x.failure is None if number is None else x.number == number)]
        answers = await asyncio.gather(*(engine.explain(question) for engine in asked), return_exceptions=True)
        found = [(x.number, each) for x, each in zip(asked, answers, strict=True) if isinstance(each, CacheAnswer)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (found and isinstance(answer, EngineError)):
                raise answer
        return max(found, key=lambda each: _hit_tokens(each[1]))

    async def flush(self) -> FlushReport | None:
        """Have all engines that run write entries that are only in memory to files, and return the sum.

        They accept no more requests. None: no files outlive the process.

        Raises:
            EngineError: an engine has not answered; the others have.
        """
        asked = [engine.flush() for engine in self.engines if engine.failure is None]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        reports = [answer for answer in answers if isinstance(answer, FlushReport)]
        return sum(reports[1:], reports[0]) if reports else None

    async def receive(self, engine: EngineLink) -> None:
        """Receive an engine's messages until cancelled."""
        while True:
            message = await engine.receive()
            match message:
                case Stepped(events):
                    self._receive_events(engine, events)
                case AskPictures(digests):
                    self._send_pictures(engine, digests)
                case CacheChanged(batch):
                    if self._router is not None:
                        self._router.apply(engine.number, batch)
                case Died(reason):
                    self.fail(engine, reason)
                case _:
                    engine.take_answer(message)

    def _send_pictures(self, engine: EngineLink, digests: Sequence[bytes]) -> None:
        """Send an engine pictures of its requests. Those of requests that have been closed are wanted no longer."""
        requests = [request for request in self._requests.values() if request.engine is engine]
        held = {picture.digest: picture for request in requests for _, picture in request.prompt.pictures}
        pictures = [held[digest] for digest in digests if digest in held]
        if pictures:
            engine.send(encode(SendPictures(pictures)))

    def _receive_events(self, engine: EngineLink, events: StepEvents) -> None:
        streams, stopped = self.frontend.take(events)
        self._finish(engine, stopped)
        now = SYSTEM_CLOCK()
        for stream in streams:
            request_id = stream.request_id
            self.metrics.observe(stream, now, engine.number)
            if self._router is not None:
                self._router.begin(request_id)
            if stream.is_finished:
                self._observe_end(stream, self._requests[request_id], now)
                self._release(request_id)
            self._requests[request_id].job.note(request_id)

    def _observe_abort(self, stream: RequestStream, request: _Request) -> None:
        self.metrics.forget(stream.request_id, request.engine.number)
        self._observe_end(stream, request, SYSTEM_CLOCK())
        self._release(stream.request_id)

    def _observe_end(self, stream: RequestStream, request: _Request, now_s: float) -> None:
        num_hit = 0 if stream.account is None else stream.account.hit
        request.tenant.settle(stream.num_output_tokens, num_hit)
        for observer in self._observers:
            observer.end(stream, request.engine.number, now_s)


def least_limits(engines: Sequence[EngineLink]) -> Limits:
    """Return limits that hold for all engines."""
    return min((engine.limits for engine in engines), key=lambda limits: limits.max_model_len)


async def _stats_or_none(engine: EngineLink) -> CoreStats | None:
    try:
        return await engine.ask_stats()
    except EngineError:
        return None


def _hit_tokens(answer: CacheAnswer) -> int:
    """Return how many tokens an explained request has hit; -1 if there is no explanation."""
    return -1 if answer.explanation is None else answer.explanation.account.hit
