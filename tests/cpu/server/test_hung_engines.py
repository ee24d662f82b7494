"""What a server of several engines does while one of them hangs."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from strandline.errors import EngineError
from strandline.records.cache_questions import CacheAnswer, CacheQuestion
from strandline.records.events import Limits
from strandline.records.messages import ENCODER as TO_FRONT_END
from strandline.records.messages import TO_CORE, AskWhy, Explained, Submit
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.engine_client import EngineClient, QueueFullError
from strandline.server.engines.engine_link import EngineDeadError, EngineLink
from strandline.server.engines.engine_router import EngineRouter
from strandline.server.engines.engine_weights import Weights
from strandline.server.engines.jobs import Job
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.server.http import serving
from strandline.text.frontend import Frontend

LIMITS = Limits(1000, 100)
PREFIX = [*range(1, 65)]


class Core:
    """An engine's end of the socket and its heartbeat; it runs nothing, and may hang."""

    def __init__(self) -> None:
        self.hang: str | None = None
        self.num_submitted = 0
        self._said: asyncio.Queue[bytes] = asyncio.Queue()

    def find_hang(self) -> str | None:
        return self.hang

    def send(self, data: bytes) -> None:
        match TO_CORE.decode(data):
            case Submit(sequences):
                self.num_submitted += len(sequences)
            case AskWhy(number, question):
                answer = CacheAnswer(request_id=question.request_id)
                self._said.put_nowait(TO_FRONT_END.encode(Explained(number, answer)))

    async def recv(self) -> bytes:
        return await self._said.get()


class Pair:
    """Two engines behind one client, at most four outputs."""

    def __init__(self) -> None:
        self.cores = [Core(), Core()]
        links = [EngineLink(x, LIMITS, x, number=i, name=f"engine {i}") for i, x in enumerate(self.cores)]
        frontend = Frontend(LIMITS, eos_ids=frozenset({0}))
        metrics = Metrics("tiny", 2)
        self.client = EngineClient(links, frontend, metrics, max_unfinished=4, router=EngineRouter(range(2)))
        self._num_jobs = 0

    def submit(self, tokens: list[int], n: int = 1) -> Job:
        self._num_jobs += 1
        params = self.client.frontend.check_params(SamplingParams(n=n, max_tokens=20))
        return self.client.submit(f"job-{self._num_jobs}", [Prompt(tokens)], params)

    def engine_of(self, tokens: list[int]) -> int:
        """Return the engine that gets a prompt."""
        before = [core.num_submitted for core in self.cores]
        with self.submit(tokens):
            return next(i for i, core in enumerate(self.cores) if core.num_submitted > before[i])


def run(check: Callable[[Pair], Awaitable[None]]) -> None:
    async def with_pair() -> None:
        pair = Pair()
        receiving = [asyncio.ensure_future(pair.client.receive(engine)) for engine in pair.client.engines]
        try:
            await check(pair)
        finally:
            for task in receiving:
                task.cancel()

    asyncio.run(with_pair())


def test_a_conversation_leaves_an_engine_that_hangs() -> None:
    async def check(pair: Pair) -> None:
        first = pair.engine_of(PREFIX)
        assert pair.engine_of([*PREFIX, 6]) == first
        pair.cores[first].hang = "no sign of life"
        assert pair.engine_of([*PREFIX, 7]) == 1 - first

    run(check)


def test_outputs_that_are_stuck_take_no_room_from_others() -> None:
    async def check(pair: Pair) -> None:
        with pair.submit(PREFIX, n=3):
            [first] = [i for i, core in enumerate(pair.cores) if core.num_submitted]
            with pytest.raises(QueueFullError):
                pair.submit([*PREFIX, 7], n=2)
            pair.cores[first].hang = "no sign of life"
            with pair.submit([*PREFIX, 7], n=4), pytest.raises(QueueFullError):
                pair.submit([*PREFIX, 8])
            pair.cores[1 - first].hang = "no sign of life"
            with pytest.raises(QueueFullError):  # where all hang, none is stuck more than others
                pair.submit([*PREFIX, 8], n=2)

    run(check)


def test_engines_with_old_weights_do_not_replace_hung_ones() -> None:
    async def check(pair: Pair) -> None:
        pair.client.change_weights([pair.client.engines[0]], Weights("e1", "step-1"))
        pair.cores[0].hang = "no sign of life"
        with pair.submit(PREFIX, n=3):
            assert pair.cores[0].num_submitted == 3
            with pytest.raises(QueueFullError):
                pair.submit([*PREFIX, 7], n=2)

    run(check)


def test_questions_are_answered_by_those_that_respond() -> None:
    async def check(pair: Pair) -> None:
        question = CacheQuestion(request_id="x")
        pair.cores[0].hang = "no sign of life"
        assert (await pair.client.explain(question))[0] == 1
        with pytest.raises(EngineError, match="engine 0 does not answer: no sign of life"):
            await pair.client.explain(question, number=0)
        pair.cores[1].hang = "no sign of life"
        with pytest.raises(EngineError, match="engine 0 does not answer"):
            await pair.client.explain(question)

    run(check)


def test_a_drain_does_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_S", 0.0)

    async def check(pair: Pair) -> None:
        http: Any = SimpleNamespace(should_exit=False, force_exit=False)
        with pair.submit(PREFIX) as stuck:
            [first] = [i for i, core in enumerate(pair.cores) if core.num_submitted]
            with pair.submit([500, 501]) as running:
                watching = asyncio.ensure_future(serving._watch(http, pair.client))
                pair.cores[first].hang = "no sign of life"
                for _ in range(5):
                    await asyncio.sleep(0)
                assert pair.client.engines[first].failure is None
                http.should_exit = True
                with pytest.raises(EngineDeadError, match=f"engine {first} has stopped: it hangs: no sign of life"):
                    await stuck.whole()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(running.whole(), 0.01)
                watching.cancel()
        assert pair.client.num_jobs_failed == 1

    run(check)
