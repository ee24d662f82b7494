"""Requests whose prompt or grammar is being prepared count as queued."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from strandline.records.control import ResetCache
from strandline.records.events import CoreStats, Limits
from strandline.records.messages import ENCODER as TO_FRONT_END
from strandline.records.messages import TO_CORE, AskStats, Control, Controlled, FromCore, Stats, Submit
from strandline.records.pictures import Picture, PictureSpan, PlacedPicture
from strandline.records.sampling_params import SamplingParams
from strandline.server.app import build_app
from strandline.server.engines import engine_client
from strandline.server.engines.engine_client import EngineClient, QueueFullError
from strandline.server.engines.engine_control import EngineControl
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.server.requests.service import Service
from strandline.text.frontend import Frontend
from strandline.text.structured import Grammars
from tests.cpu.engine.tokenizers import TEMPLATE, byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE
from tests.cpu.server.core_loop import new_heartbeat

TIMEOUT_S = 120.0
MEMORY = dict.fromkeys(("slots_in_use", "blocks_in_use", "slots_evictable", "blocks_evictable", "free"), 1)
IDLE = CoreStats(0, 0, 0, 0, 0, {}, {}, {}, 0, 0, 0, MEMORY)


class SilentCore:
    """The core's end of the socket: says how it stands when asked, and runs nothing."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[Submit] = asyncio.Queue()
        self.controlled: list[Any] = []
        self._said: asyncio.Queue[FromCore] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        match TO_CORE.decode(data):
            case AskStats():
                self.say(Stats(IDLE))
            case Submit() as submit:
                self.submitted.put_nowait(submit)
            case Control(number, action):
                self.controlled.append(action)
                self.say(Controlled(number, result=True))

    def say(self, message: FromCore) -> None:
        self._said.put_nowait(message)

    async def recv(self) -> bytes:
        return TO_FRONT_END.encode(await self._said.get())


class Server:
    """A server of one output at a time, whose tokenizer and grammars wait until they may go."""

    def __init__(self) -> None:
        self.core = SilentCore()
        self.is_asked = threading.Event()
        self.may_go = threading.Event()
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = TEMPLATE

        def vocabulary() -> tuple[Any, frozenset[int]]:
            self.is_asked.set()
            assert self.may_go.wait(TIMEOUT_S)
            return tokenizer, eos_ids

        eos_ids = frozenset({0})
        grammars = Grammars(vocabulary, VOCAB_SIZE)
        limits = Limits(VOCAB_SIZE, 100)
        frontend = Frontend(limits, tokenizer=tokenizer, eos_ids=eos_ids, grammars=grammars)
        heartbeat = new_heartbeat()
        heartbeat.beat()
        core: Any = self.core
        self.client = EngineClient([EngineLink(core, limits, heartbeat)], frontend, Metrics("tiny"), max_unfinished=1)
        self.service = Service(self.client, ["tiny"])
        self._http = httpx.ASGITransport(build_app(self.service))

    def hold_tokenizer(self) -> None:
        self._holding = asyncio.ensure_future(self.service.in_thread(lambda: self.may_go.wait(TIMEOUT_S)))

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._http, base_url="http://tiny", timeout=TIMEOUT_S) as http:
            return await http.post(path, json=body)

    async def num_waiting(self) -> float:
        async with httpx.AsyncClient(transport=self._http, base_url="http://tiny", timeout=TIMEOUT_S) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        [line] = [line for line in lines if line.startswith("strandline:num_requests_waiting{")]
        return float(line.split()[-1])


@asynccontextmanager
async def held_server() -> AsyncIterator[Server]:
    server = Server()
    receiving = asyncio.ensure_future(server.client.receive(server.client.engines[0]))
    try:
        yield server
    finally:
        server.may_go.set()
        receiving.cancel()


YES = {"structured_outputs": {"choice": ["yes"]}}
SCHEMA = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", CHAT),
    "message": ("/v1/messages", CHAT),
    "response": ("/v1/responses", {"input": "x"}),
    "bound completion": ("/v1/completions", {"prompt": [1, 2], **YES}),
    "bound chat": ("/v1/chat/completions", {**CHAT, **YES}),
    "bound message": ("/v1/messages", {**CHAT, **YES}),
    "bound response": ("/v1/responses", {"input": "x", "text": {"format": SCHEMA}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_requests_being_prepared_count_as_queued(name: str) -> None:
    path, body = BODIES[name]

    async def ask() -> None:
        async with held_server() as server:
            if "bound" not in name:
                server.hold_tokenizer()
            both = {asyncio.ensure_future(server.post(path, body))}
            if "bound" in name:
                assert await asyncio.to_thread(server.is_asked.wait, TIMEOUT_S)
            both.add(asyncio.ensure_future(server.post(path, body)))
            done, [waiting] = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
            [refused] = [task.result() for task in done]
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert server.core.submitted.empty()
            assert await server.num_waiting() == 1
            server.may_go.set()
            assert len((await server.core.submitted.get()).submissions) == 1
            assert await server.num_waiting() == 0  # the core counts it from here on
            assert (await server.post(path, body)).status_code == 429
            server.client.fail(server.client.engines[0], "the test is over")
            assert (await waiting).status_code == 503

    asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


@pytest.mark.parametrize("was_reset", [True, False])
def test_restarted_engine_begins_an_epoch_after_a_reset(was_reset: bool) -> None:
    async def ask() -> None:
        async with held_server() as server:
            [engine] = server.client.engines
            control = EngineControl(server.client)
            if was_reset:
                assert await control.reset_cache(forced=False)
            before = list(server.core.controlled)
            core: Any = server.core
            server.client.reconnect(engine, core, engine.limits, new_heartbeat())
            actions = server.core.controlled[len(before) :]
            assert [isinstance(action, ResetCache) and action.forced for action in actions] == [True] * was_reset
            assert len({action.epoch for action in (*before, *actions)}) == 2 * was_reset

    asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


def test_failed_request_releases_its_place_in_queue() -> None:
    async def ask() -> None:
        async with held_server() as server:
            server.may_go.set()
            for wrong in ("[", "(?"):
                body = {"prompt": [1], "structured_outputs": {"regex": wrong}}
                assert (await server.post("/v1/completions", body)).status_code == 400
            asking = asyncio.ensure_future(server.post("/v1/completions", {"prompt": "x"}))
            assert len((await server.core.submitted.get()).submissions) == 1
            server.client.fail(server.client.engines[0], "the test is over")
            assert (await asking).status_code == 503

    asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


def test_what_is_asked_for_together_takes_room_together() -> None:
    async def ask() -> None:
        async with held_server() as server:
            for body in ({"prompt": ["x", "y"]}, {"prompt": "x", "n": 2}):
                answer = await server.post("/v1/completions", body)
                assert answer.status_code == 400
                assert "asks for 2 outputs" in answer.json()["error"]["message"]

    asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))


def picture(name: bytes, start: int) -> PlacedPicture:
    return PlacedPicture(PictureSpan(start, 1, 1, name), Picture(name, bytes(100), 1, 1, (1, 1)))


def test_pictures_of_unfinished_requests_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_PIXEL_BYTES", 250)
    core: Any = SilentCore()
    frontend = Frontend(Limits(VOCAB_SIZE, 100, max_picture_tokens=1))
    engine = EngineLink(core, frontend.limits, new_heartbeat())
    client = EngineClient([engine], frontend, Metrics("tiny"), max_unfinished=9)
    params = frontend.check_params(SamplingParams())
    twice = Prompt([1, 2, 3], pictures=(picture(b"cat", 0), picture(b"cat", 2)))
    two = Prompt([1, 2, 3], pictures=(picture(b"cat", 0), picture(b"dog", 2)))
    with client.submit("first", [twice], params):
        with client.submit("second", [twice], params):
            with pytest.raises(QueueFullError, match="take 200 bytes, and these 100; at most 250 are kept"):
                client.submit("third", [twice], params)
            client.close(client.submit("text", [Prompt([1])], params))
        with pytest.raises(QueueFullError):
            client.submit("fourth", [two], params)
    client.close(client.submit("fifth", [two], params))
