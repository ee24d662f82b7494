"""Outputs of a job: what has arrived comes at once, and a time limit loses nothing that is complete."""

import asyncio
from typing import Any

import pytest

from strandline.records.outputs import RequestDelta
from strandline.server.engines.engine_link import EngineDeadError, RequestTimeoutError
from strandline.server.engines.jobs import Job

TIMEOUT_S = 0.01


class Stream:
    """A request whose outputs are taken as a number."""

    def __init__(self, name: str) -> None:
        self.request_id = name
        self.is_finished = False
        self.num_taken = 0
        self.num_new = 0

    def is_due(self, interval: int) -> bool:
        return self.is_finished or self.num_new % interval == 0

    def take(self) -> RequestDelta:
        self.num_taken += 1
        return RequestDelta([], self.is_finished, None)


def new_job(*streams: Stream, timeout_s: float | None = None, stream_interval: int = 1) -> Job:
    given: Any = streams
    return Job(lambda job: None, given, timeout_s, stream_interval)


async def all_bursts(job: Job) -> list[list[int]]:
    return [[index for index, _ in burst] async for burst in job.bursts()]


def test_outputs_that_have_arrived_come_in_one_burst() -> None:
    async def run() -> None:
        a, b = Stream("a"), Stream("b")
        job = new_job(a, b)
        taking = asyncio.ensure_future(all_bursts(job))
        for name in ("b", "a", "b"):
            job.note(name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        a.is_finished = True
        job.note("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        b.is_finished = True
        job.note("b")
        assert await taking == [[1, 0], [0], [1]]
        assert (a.num_taken, b.num_taken) == (2, 2)

    asyncio.run(run())


@pytest.mark.parametrize("whole", [False, True])
def test_job_fails_after_its_time(whole: bool) -> None:
    async def run() -> None:
        job = new_job(Stream("a"), timeout_s=TIMEOUT_S)
        with job, pytest.raises(RequestTimeoutError, match="request took longer"):
            await (job.whole() if whole else all_bursts(job))

    asyncio.run(run())


@pytest.mark.parametrize("whole", [False, True])
def test_complete_output_is_returned_after_the_time_limit(whole: bool) -> None:
    async def run() -> None:
        stream = Stream("a")
        job = new_job(stream, timeout_s=TIMEOUT_S)
        stream.is_finished = True
        job.note("a")
        await asyncio.sleep(3 * TIMEOUT_S)
        assert len(await (job.whole() if whole else all_bursts(job))) == 1

    asyncio.run(run())


@pytest.mark.parametrize("whole", [False, True])
def test_job_fails_with_its_engine(whole: bool) -> None:
    async def run() -> None:
        job = new_job(Stream("a"))
        job.note("a")
        job.fail("the engine has stopped")
        with pytest.raises(EngineDeadError, match="has stopped"):
            await (job.whole() if whole else all_bursts(job))

    asyncio.run(run())


def test_left_job_has_no_timer() -> None:
    async def run() -> None:
        job = new_job(Stream("a"), timeout_s=TIMEOUT_S)
        with job:
            pass
        await asyncio.sleep(3 * TIMEOUT_S)
        job.note("a")
        assert await anext(job.bursts())

    asyncio.run(run())
