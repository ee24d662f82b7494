"""Pictures travel to an engine once, and again only when it asks for them."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from strandline import SamplingParams
from strandline.config import EngineConfig
from strandline.engine.loading import load_core
from strandline.ids import RequestId
from strandline.records.events import Limits, Submission
from strandline.records.messages import ENCODER as TO_FRONT_END
from strandline.records.messages import (
    FROM_CORE,
    TO_CORE,
    AskPictures,
    Finish,
    FromCore,
    SendPictures,
    Stepped,
    Submit,
)
from strandline.records.pictures import Picture, PictureSpan, PlacedPicture
from strandline.records.plan import NewRequest
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.text.frontend import Frontend
from tests.cpu.device import picture_driver
from tests.cpu.device.picture_driver import random_picture, text
from tests.cpu.engine.vision_engine import save_vision_model
from tests.cpu.server.core_loop import LoopInThread, new_heartbeat

NUM_TOKENS = 4
ASKS = Limits(1000, 100, max_picture_tokens=1, asks_for_pictures=True)
CAT, DOG = random_picture(3, 7), random_picture(6, 2)


class Core:
    """The engine's end of the socket: stores what comes, and runs nothing."""

    def __init__(self) -> None:
        self.pictures = list[list[bytes]]()
        """Digests of the pictures in each message that can have some."""
        self._said: asyncio.Queue[FromCore] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        match TO_CORE.decode(data):
            case Submit(_, pictures) | SendPictures(pictures):
                self.pictures.append([picture.digest for picture in pictures])

    def ask(self, *digests: bytes) -> None:
        self._said.put_nowait(AskPictures(list(digests)))

    async def recv(self) -> bytes:
        return TO_FRONT_END.encode(await self._said.get())


class Front:
    """An HTTP process's client of engines that only listen."""

    def __init__(self, limits: Limits = ASKS) -> None:
        self.core: Any = Core()
        frontend = Frontend(limits)
        self.engine = EngineLink(self.core, limits, new_heartbeat())
        self.client = EngineClient([self.engine], frontend, Metrics("tiny"), max_unfinished=9)
        self._num_jobs = 0

    def submit(self, *names: bytes) -> Any:
        self._num_jobs += 1
        placed = [
            PlacedPicture(PictureSpan(2 * index, 1, 1, name), Picture(name, bytes(100), 1, 1, (1, 1)))
            for index, name in enumerate(names)
        ]
        prompt = Prompt([1] * (2 * len(names) + 1), pictures=tuple(placed))
        params = self.client.frontend.check_params(SamplingParams())
        return self.client.submit(f"job-{self._num_jobs}", [prompt], params)

    async def pass_messages(self) -> None:
        """Let the client receive what the engine has said."""
        receiving = asyncio.ensure_future(self.client.receive(self.engine))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])


def test_picture_is_sent_to_an_engine_once() -> None:
    front = Front()
    front.client.close(front.submit(b"cat"))
    front.submit(b"cat", b"dog")
    front.submit(b"dog", b"cat")
    assert front.core.pictures == [[b"cat"], [b"dog"], []]


def test_engine_that_asks_gets_pictures_of_unfinished_requests() -> None:
    async def check() -> None:
        front = Front()
        front.client.close(front.submit(b"cat"))
        job = front.submit(b"cat", b"dog")
        front.core.ask(b"cat", b"dog")
        await front.pass_messages()
        assert front.core.pictures[2:] == [[b"cat", b"dog"]]
        front.client.close(job)
        front.core.ask(b"cat")
        await front.pass_messages()
        assert len(front.core.pictures) == 3

    asyncio.run(check())


def test_new_engine_process_gets_all_pictures_again() -> None:
    front = Front()
    front.submit(b"cat")
    front.client.reconnect(front.engine, front.core, front.engine.limits, new_heartbeat())
    front.submit(b"cat")
    assert front.core.pictures == [[b"cat"], [b"cat"]]


def test_engine_that_does_not_ask_gets_all_pictures() -> None:
    front = Front(Limits(1000, 100, max_picture_tokens=1))
    front.submit(b"cat")
    front.submit(b"cat")
    assert front.core.pictures == [[b"cat"], [b"cat"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model("qwen3_5-vision", tmp_path_factory.mktemp("vision"))


class Engine:
    """An engine, and the front end's part of its conversation."""

    def __init__(self, loop: LoopInThread) -> None:
        self.loop = loop
        self.asked = list[list[bytes]]()

    def submit(self, name: str, prompt: picture_driver.Prompt, left_out: Sequence[bytes] = ()) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        new = NewRequest(RequestId(name), prompt.token_ids, params, 0, frozenset(), ())
        pixels = {picture.digest: picture for _, picture in prompt.pictures}
        submission = Submission(new, len(prompt.token_ids) + NUM_TOKENS, pictures=prompt.spans, pixels=pixels)
        self.loop.say(Submit.of([submission], left_out))

    def receive(self) -> FromCore:
        message: FromCore = FROM_CORE.decode(self.loop.socket.recv())
        if isinstance(message, AskPictures):
            self.asked.append(message.digests)
        return message

    def answer(self, name: str) -> list[int]:
        """Return the answer of a sequence; send the pictures that the engine asks for meanwhile."""
        answer = list[int]()
        while len(answer) < NUM_TOKENS:
            match self.receive():
                case AskPictures(digests):
                    self.loop.say(SendPictures([each for each in (CAT, DOG) if each.digest in digests]))
                case Stepped(events):
                    answer += [event.token_id for event in events.tokens if event.request_id == name]
        return answer


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    threads = torch.get_num_threads()
    config = EngineConfig(model=str(model), memory="16MiB", device="cpu", skip_tokenizer_init=True)
    with zmq.Context() as context:
        loop = LoopInThread(load_core(config), context)
        yield Engine(loop)
        loop.close()
    torch.set_num_threads(threads)


def test_answers_without_pixels_equal_those_with_them(engine: Engine) -> None:
    prompt = picture_driver.Prompt.of(text(9), CAT, text(12, 1), DOG, text(5))
    engine.submit("asks", prompt, [CAT.digest, DOG.digest])
    answer = engine.answer("asks")
    assert engine.asked == [[CAT.digest, DOG.digest]]
    engine.submit("hits", prompt, [CAT.digest, DOG.digest])
    assert engine.answer("hits") == answer
    assert len(engine.asked) == 1
    other = picture_driver.Prompt.of(text(8, 2), CAT, text(12, 1))
    engine.submit("brings", other)
    expected = engine.answer("brings")
    engine.submit("resumes", other)
    assert engine.answer("resumes") == expected


def test_sequence_that_waits_for_pixels_blocks_no_other(engine: Engine) -> None:
    engine.submit("waits", picture_driver.Prompt.of(text(9), CAT, text(3)), [CAT.digest])
    while not engine.asked:
        engine.receive()
    engine.submit("goes on", picture_driver.Prompt.of(text(9, 1), DOG, text(3)))
    engine.answer("goes on")
    engine.loop.say(Finish([RequestId("waits")]))
    engine.submit("asks again", picture_driver.Prompt.of(text(9), CAT, text(3)), [CAT.digest])
    engine.answer("asks again")
    assert engine.asked == [[CAT.digest]] * 2
