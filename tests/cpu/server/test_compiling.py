"""Grammars that take long: the streams of others go on."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from strandline.config import EngineConfig
from strandline.engine.core import EngineCore
from strandline.engine.events import Limits, Submission
from strandline.engine.frontend import Frontend
from strandline.engine.loading import load_core
from strandline.engine.plan import NewRequest
from strandline.engine.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.engine.structured import Grammars
from strandline.ids import RequestId
from strandline.server.core_process import CoreLoop
from strandline.server.messages import ENCODER, FROM_CORE, AskStats, Finish, Stats, Stepped, Submit, ToCore
from strandline.server.service import Service
from tests.cpu.engine.tokenizers import byte_tokenizer
from tests.cpu.server.conftest import VOCAB_SIZE

TIMEOUT_S = 120.0
YES = StructuredOutputsParams(choice=["yes"])


class HeldTokenizer:
    """A source of a tokenizer that gives none until it is let."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_go = threading.Event()

    def __call__(self) -> tuple[Any, frozenset[int]]:
        self.is_asked.set()
        assert self.may_go.wait(TIMEOUT_S)
        return byte_tokenizer(), frozenset({0})


@pytest.fixture
def held() -> Iterator[HeldTokenizer]:
    source = HeldTokenizer()
    yield source
    source.may_go.set()


class LoopInThread:
    """A core's loop, and the front end's end of its socket."""

    def __init__(self, core: EngineCore, grammars: Grammars, context: zmq.Context[Any]) -> None:
        self.core = core
        self.socket = context.socket(zmq.PAIR)
        self.socket.rcvtimeo = int(TIMEOUT_S * 1000)
        self.socket.bind("inproc://core")
        theirs = context.socket(zmq.PAIR)
        theirs.connect("inproc://core")
        lifeline, self._lifeline = os.pipe()

        def run() -> None:
            with theirs:
                CoreLoop(core, grammars, theirs, lifeline).run()
            os.close(lifeline)

        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(run)

    def say(self, message: ToCore) -> None:
        self.socket.send(ENCODER.encode(message))

    def submit(self, name: str, structure: StructuredOutputsParams | None = None) -> None:
        params = SamplingParams(max_tokens=6, structured_outputs=structure)
        new = NewRequest(RequestId(name), [1, 2, 3], params, 0, frozenset({0}), ())
        self.say(Submit([Submission(new, max_total=9)]))

    def finished(self) -> str:
        """Return the name of the next sequence that ends."""
        while True:
            message = FROM_CORE.decode(self.socket.recv())
            assert isinstance(message, Stepped)
            for event in message.events.tokens:
                if event.finish_reason is not None:
                    return event.request_id

    def num_waiting(self) -> int:
        self.say(AskStats())
        message = FROM_CORE.decode(self.socket.recv())
        assert isinstance(message, Stats)
        return message.stats.num_waiting

    def close(self) -> None:
        os.close(self._lifeline)
        self._running.result(TIMEOUT_S)
        self._thread.shutdown()
        self.socket.close()


MakeLoop = Callable[[Grammars], LoopInThread]


@pytest.fixture
def make_loop(bytes_dir: Path) -> Iterator[MakeLoop]:
    """Run a core of the tiny model in a thread."""
    loops = []
    threads = torch.get_num_threads()
    core = load_core(EngineConfig(model=str(bytes_dir), memory="16MiB", device="cpu"))
    with zmq.Context() as context:

        def make(grammars: Grammars) -> LoopInThread:
            loops.append(LoopInThread(core, grammars, context))
            return loops[-1]

        yield make
        for loop in loops:
            loop.close()
    torch.set_num_threads(threads)


def test_a_grammar_whose_vocabulary_is_not_ready_lets_others_finish_first(
    held: HeldTokenizer, make_loop: MakeLoop
) -> None:
    grammars = Grammars(held, VOCAB_SIZE)
    grammars.begin()
    loop = make_loop(grammars)
    loop.submit("bound", YES)
    for name in ("first", "second"):
        loop.submit(name)
        assert loop.finished() == name
    assert held.is_asked.is_set()
    assert loop.num_waiting() == 1
    held.may_go.set()
    assert loop.finished() == "bound"
    assert loop.num_waiting() == 0


def test_a_request_that_ends_while_its_grammar_is_compiled_never_runs(held: HeldTokenizer, make_loop: MakeLoop) -> None:
    loop = make_loop(Grammars(held, VOCAB_SIZE))
    loop.submit("gone", YES)
    loop.submit("other", YES)
    assert loop.num_waiting() == 2
    loop.say(Finish([RequestId("gone")]))
    assert loop.num_waiting() == 1
    held.may_go.set()
    assert loop.finished() == "other"
    assert loop.num_waiting() == 0
    assert not loop.core.runner.matchers


def test_a_grammar_is_compiled_where_it_holds_up_no_tokenizing(held: HeldTokenizer) -> None:
    class Client:
        frontend = Frontend(Limits(VOCAB_SIZE, 100), tokenizer=byte_tokenizer(), grammars=Grammars(held, VOCAB_SIZE))

    service = Service(Client(), ["tiny"])  # type: ignore[arg-type]

    async def ask() -> list[int]:
        checking = asyncio.ensure_future(service.check(YES))
        prompt = await service.encode("abc")
        assert await asyncio.to_thread(held.is_asked.wait, TIMEOUT_S)
        assert not checking.done()
        held.may_go.set()
        await checking
        return prompt.token_ids

    assert asyncio.run(ask()) == byte_tokenizer().encode("abc")
