"""The load generator: sends a dataset's sessions at a pace, and records the answers."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from strandline.bench.ideal import SeenPrefixes
from strandline.bench.serving.load_client import ServerUnderLoad
from strandline.bench.serving.options import Pace
from strandline.bench.serving.prompt_vocabulary import Vocabulary
from strandline.bench.serving.session import Answer, Ask, Session
from strandline.records.tokens import encode


@dataclass(slots=True)
class Run:
    """Results of a run so far."""

    answers: list[Answer] = field(default_factory=list)
    """Outcomes in the order in which requests ended."""
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    """CPU time of the load generator itself."""
    num_interrupted: int = 0
    """Requests that were in flight when the run was ended."""
    is_interrupted: bool = False


def arrival_times(num_sessions: int, pace: Pace) -> list[float]:
    """Return the start of each session, in seconds from the start of the run, ascending.

    At a constant rate the gaps are scaled so that all arrive within exactly ``num_sessions / rate``: otherwise the
    real rate of a run would differ by a few per cent from seed to seed.
    """
    shares = np.arange(num_sessions) / max(num_sessions - 1, 1)
    first, last = pace.ramp_rates
    if pace.ramp == "linear":
        rates = first + (last - first) * shares
    elif pace.ramp == "exponential":
        rates = first * (last / first) ** shares
    else:
        rates = np.full(num_sessions, pace.request_rate)
    if rates[0] == inf:
        return [0.0] * num_sessions
    if pace.burstiness == inf:
        gaps = 1 / rates
    else:
        gaps = np.random.default_rng(pace.seed).gamma(pace.burstiness, 1 / (rates * pace.burstiness))
    times = np.cumsum(gaps)
    if pace.ramp is None:
        times *= num_sessions / pace.request_rate / times[-1]
    return [float(time_s) for time_s in times]


class Gate:
    """Limit of concurrent requests; None: unlimited."""

    def __init__(self, limit: int | None) -> None:
        self._semaphore = None if limit is None else asyncio.Semaphore(limit)

    async def enter(self) -> None:
        """Wait until there is room, and count one more."""
        if self._semaphore is not None:
            await self._semaphore.acquire()

    def leave(self) -> None:
        """Count one less."""
        if self._semaphore is not None:
            self._semaphore.release()


class Load:
    """One run.

    Args:
        vocabulary: reads the answers' text, so that later turns may count them as seen.
        on_answer: called after each answer.
    """

    def __init__(
        self,
        server: ServerUnderLoad,
        pace: Pace,
        vocabulary: Vocabulary,
        on_answer: Callable[[Answer], object] = lambda answer: None,
    ) -> None:
        self.run = Run()
        self._server = server
        self._pace = pace
        self._vocabulary = vocabulary
        self._on_answer = on_answer
        self._seen = defaultdict[str, SeenPrefixes](SeenPrefixes)
        """By adapter: prefixes are not shared across these."""
        self._num_left = pace.num_requests
        self._num_under_way = 0
        self._is_spent = asyncio.Event()
        self._gate = Gate(pace.max_concurrency)
        self._begin_s = 0.0

    async def execute(self, sessions: Sequence[Session]) -> Run:
        """Send all requests; if cancelled, abort those in flight and return the results so far."""
        times = arrival_times(len(sessions), self._pace)
        starts = [
            at_s if session.start_s is None else session.start_s for at_s, session in zip(times, sessions, strict=True)
        ]
        self._begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        tasks: set[asyncio.Task[None]] = set()
        try:
            for start_s, session in sorted(zip(starts, sessions, strict=True), key=lambda pair: pair[0]):
                await self._wait_until(self._begin_s + start_s)
                if self._is_spent.is_set():
                    break
                # Sessions wait here, not in separate tasks, since there may be very many.
                if session.holds_its_place:
                    await self._gate.enter()
                tasks.add(asyncio.create_task(self._talk(session, self._begin_s + start_s)))
                _raise_first(tasks)
            await _all(tasks)
        except asyncio.CancelledError:
            self.run.is_interrupted, self.run.num_interrupted = True, self._num_under_way
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.run.duration_s = time.perf_counter() - self._begin_s
        self.run.client_cpu_s = time.process_time() - begin_cpu_s
        return self.run

    async def _talk(self, session: Session, start_s: float) -> None:
        try:
            await self._ask_and_answer(session, start_s)
        finally:
            if session.holds_its_place:
                self._gate.leave()

    async def _ask_and_answer(self, session: Session, start_s: float) -> None:
        asks = session.asks()
        ask: Ask | None = next(asks, None)
        ended_s = start_s
        while ask is not None:
            await self._wait_until(max(start_s + ask.at_s, ended_s + ask.think_s))
            if not session.holds_its_place:
                await self._gate.enter()
            try:
                if not self._take_one():
                    return
                answer = await self._send(ask)
            finally:
                if not session.holds_its_place:
                    self._gate.leave()
            ended_s = time.perf_counter()
            try:
                ask = asks.send(answer)
            except StopIteration:
                return

    def _take_one(self) -> bool:
        """Return whether another request may be sent."""
        if self._num_left == 0:
            return False
        self._num_left -= 1
        if self._num_left == 0:
            self._is_spent.set()
        return True

    async def _send(self, ask: Ask) -> Answer:
        ideal = None if ask.tokens is None else self._seen_by(ask).add(bytearray(ask.tokens))
        self._num_under_way += 1
        answer = await self._server.send(ask)
        self._num_under_way -= 1
        answer.start_s -= self._begin_s
        answer.ideal_tokens = ideal
        self._remember(ask, answer)
        self.run.answers.append(answer)
        self._on_answer(answer)
        return answer

    def _remember(self, ask: Ask, answer: Answer) -> None:
        """Record generated text, which a later turn may contain."""
        ids = answer.token_ids or self._vocabulary.encode(answer.text)
        if ask.tokens is not None and ids:
            self._seen_by(ask).add(bytearray(ask.tokens + encode(ids)))

    def _seen_by(self, ask: Ask) -> SeenPrefixes:
        return self._seen[ask.body.get("model", "")]

    async def _wait_until(self, time_s: float) -> None:
        """Wait for a time, or until no more requests are to be sent."""
        delay_s = time_s - time.perf_counter()
        if delay_s > 0 and not self._is_spent.is_set():
            try:
                await asyncio.wait_for(self._is_spent.wait(), delay_s)
            except TimeoutError:
                return


def _raise_first(tasks: set[asyncio.Task[None]]) -> None:
    """Raise what a task that has ended raised, and forget those that ended well."""
    for task in [task for task in tasks if task.done()]:
        tasks.discard(task)
        task.result()


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all tasks; raise the first error at once."""
    if tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
