"""Three replicas of the demo model on real Ray: one endpoint, a router that knows snapshots, and deaths under load.

Left out where Ray is not installed, as in ``make test``: ``pip install 'strandline[ray]'`` first. Takes minutes.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="needs strandline[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

from benchmarks.ray_routers import conversations, deploy, ray_serve, send  # noqa: E402  # the benchmark of the same

APP = f"strandline-test-{os.getpid()}"
NUM_STREAMS = 18


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ray_serve() as address:
        deploy(APP)
        yield address


def chat(index: int, **more: Any) -> dict[str, Any]:
    text = f"Hello! My name is Ada, and I am number {index}. What is the capital of Italy?"
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def test_one_endpoint_answers_and_the_next_turn_hits(url: str) -> None:
    body = chat(1, max_tokens=20)
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert client.get("/health").status_code == 200
        assert "strandline" in client.get("/metrics").raise_for_status().text
        answers = [client.post("/v1/chat/completions", json=body).raise_for_status().json() for _ in range(3)]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    hits = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert len(texts) == 1
    assert hits == [0, *[answers[0]["usage"]["prompt_tokens"]] * 2]


def test_errors_of_requests_come_back_as_such(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=chat(1, model="other")).status_code == 404
        assert client.post("/v1/chat/completions", json=chat(1, temperature=-1)).status_code == 400


def test_several_outputs_and_a_stop_string_end(url: str) -> None:
    body = chat(2, n=3, max_tokens=40, temperature=1, seed=1, stop=["a"])
    with httpx.Client(base_url=url, timeout=60) as client:
        choices = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
    assert len(choices) == 3
    assert all("a" not in choice["message"]["content"] for choice in choices)


def test_every_turn_hits_the_whole_turn_before(url: str) -> None:
    turns = asyncio.run(send(url, conversations(1, 6), "alone")).requests
    assert all(hit >= before - 2 for (before, _), (_, hit) in pairwise(turns)), turns


async def stream(client: httpx.AsyncClient, index: int) -> AsyncIterator[str]:
    """Yield the parts of a long answer; raise unless it ends as it should."""
    body = chat(index, max_tokens=120, stream=True, ignore_eos=True)
    ends = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            ends.append(data)
            if data and data != "[DONE]":
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""
    assert "[DONE]" in ends


async def answers(url: str, disturb: Callable[[], None] | None = None) -> list[str]:
    """Return the answers to streams that run together; disturb once when all have begun."""
    begun: set[int] = set()

    async def read(client: httpx.AsyncClient, index: int) -> str:
        text = ""
        async for part in stream(client, index):
            text += part
            if len(text) > 20 and index not in begun:
                begun.add(index)
                if len(begun) == NUM_STREAMS and disturb is not None:
                    disturb()
        return text

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        return list(await asyncio.gather(*(read(client, index) for index in range(NUM_STREAMS))))


def processes(is_wanted: Callable[[str], bool]) -> list[int]:
    """Return the ids of processes by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if is_wanted(command):
            found.append(int(folder.name))
    return sorted(found)


def replica_processes() -> list[int]:
    return processes(lambda command: command.startswith(f"ray::ServeReplica:{APP}:Engine"))


def engine_of(replica: int) -> int:
    """Return the engine's process, a child of a replica's."""
    [engine] = [
        process
        for process in processes(lambda command: "strandline.engine.processes.core_process" in command)
        if f"PPid:\t{replica}\n" in Path(f"/proc/{process}/status").read_text()
    ]
    return engine


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_no_request_is_lost_when_a_process_is_killed(url: str, victim: str) -> None:
    expected = asyncio.run(answers(url))

    def kill() -> None:
        replica = replica_processes()[0]
        os.kill(replica if victim == "replica" else engine_of(replica), signal.SIGKILL)

    assert asyncio.run(answers(url, kill)) == expected


def test_killed_replicas_are_replaced_and_serve(url: str) -> None:
    async def wait() -> None:
        async with asyncio.timeout(180):
            while len(replica_processes()) < 3:
                await asyncio.sleep(0.2)

    asyncio.run(wait())
    totals = asyncio.run(send(url, conversations(6, 4), "after"))
    assert len(totals.requests) == 24
    assert totals.hit_tokens > 0
