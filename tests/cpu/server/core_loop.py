"""A core loop in a thread, with the HTTP process's end of its socket in the test."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import zmq

from strandline.engine.core import EngineCore
from strandline.engine.processes.core_loop import CoreLoop
from strandline.ids import RequestId
from strandline.records.events import Submission
from strandline.records.heartbeat import Heartbeat
from strandline.records.messages import ENCODER, FROM_CORE, AskStats, Stats, Stepped, Submit, ToCore
from strandline.records.plan import NewRequest
from strandline.records.sampling_params import SamplingParams, StructuredOutputsParams
from strandline.text.structured import Grammars

TIMEOUT_S = 120.0


def new_heartbeat() -> Heartbeat:
    fd = os.memfd_create("heartbeat")
    heartbeat = Heartbeat(fd)
    os.close(fd)
    return heartbeat


class LoopInThread:
    """A core's loop, and the front end's end of its socket."""

    def __init__(self, core: EngineCore, context: zmq.Context[Any]) -> None:
        self.core = core
        self.socket = context.socket(zmq.PAIR)
        self.socket.rcvtimeo = int(TIMEOUT_S * 1000)
        self.socket.bind("inproc://core")
        theirs = context.socket(zmq.PAIR)
        theirs.connect("inproc://core")
        lifeline, self._lifeline = os.pipe()
        self.heartbeat = new_heartbeat()

        def run() -> None:
            with theirs:
                CoreLoop(core, theirs, lifeline, self.heartbeat).run()
            os.close(lifeline)

        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(run)

    def say(self, message: ToCore) -> None:
        self.socket.send(ENCODER.encode(message))

    def submit(self, name: str, structure: StructuredOutputsParams | None = None, *, adapter: str = "") -> None:
        params = SamplingParams(max_tokens=6, structured_outputs=structure)
        new = NewRequest(RequestId(name), (1, 2, 3), params, 0, frozenset({0}), (), adapter=adapter)
        self.say(Submit([Submission(new, max_total=9)]))

    def finished(self) -> str:
        """Return the name of the next sequence that ends."""
        while True:
            message = FROM_CORE.decode(self.socket.recv())
            assert isinstance(message, Stepped)
            for event in message.events.tokens:
                if event.finish_reason is not None:
                    return event.request_id

    def finish_all(self, names: Iterable[str]) -> None:
        """Wait until all of these sequences have ended, in any order."""
        left = set(names)
        while left:
            message = FROM_CORE.decode(self.socket.recv())
            assert isinstance(message, Stepped)
            left -= {event.request_id for event in message.events.tokens if event.finish_reason is not None}

    def num_waiting(self) -> int:
        self.say(AskStats())
        message = FROM_CORE.decode(self.socket.recv())
        assert isinstance(message, Stats)
        return message.stats.num_waiting

    def end(self) -> None:
        """End the loop, and wait for its end."""
        if not self._running.done():
            os.close(self._lifeline)
        self._running.result(TIMEOUT_S)

    def failure(self) -> BaseException | None:
        """Wait for the end of a loop that fails; return its error, which is then dealt with."""
        error = self._running.exception(TIMEOUT_S)
        self._running = self._thread.submit(lambda: None)
        return error

    def close(self) -> None:
        self.end()
        self._thread.shutdown()
        self.socket.close()


class MakeLoop(Protocol):
    """Makes a core of the tiny model in a thread, with options of its configuration."""

    def __call__(self, grammars: Grammars, **options: Any) -> LoopInThread: ...
