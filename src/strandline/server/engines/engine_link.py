"""The HTTP process's link to one engine: messages to it, answers to questions, and detection of failures."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from strandline.errors import EngineError, OutOfMemoryError, RequestError
from strandline.records.adapters import LoadedAdapter
from strandline.records.cache_questions import CacheAnswer, CacheQuestion, CacheState
from strandline.records.control import Action
from strandline.records.events import CoreStats, Limits, Submission
from strandline.records.messages import (
    ENCODER,
    FLUSH_S,
    FROM_CORE,
    AdapterLoaded,
    AskCache,
    AskStats,
    AskWhy,
    CacheShown,
    Control,
    Controlled,
    Explained,
    Flush,
    Flushed,
    FlushReport,
    FromCore,
    LacksMemory,
    LoadAdapter,
    Stats,
    Submit,
    ToCore,
)

ANSWER_TIMEOUT_S: Final = 5.0
LOAD_TIMEOUT_S: Final = 120.0
"""Time for an adapter, which is read between two steps."""
CONTROL_TIMEOUT_S: Final = 600.0
"""Time for weights, which may take minutes to read or to receive."""
MAX_SENT_PICTURES: Final = 16_384
"""Pictures that an engine is taken to have: what it evicts, it asks for."""
STATS_TIMEOUT_S: Final = 2.0
"""Shorter, since Prometheus gives up after 10 s by default."""


class EngineDeadError(EngineError):
    """The engine process has exited."""


class RequestTimeoutError(EngineError):
    """The request took longer than the server allows."""


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


class EngineLink:
    """One engine, as the HTTP process sees it.

    Args:
        socket: connected to an engine that is ready.
        limits: limits of the engine.
        heartbeat: detects whether the engine hangs.
        number: number of the engine among those of the server, from 0.
        name: in messages to users.
        advice: text added to errors after the engine has exited.
    """

    def __init__(
        self,
        socket: CoreSocket,
        limits: Limits,
        heartbeat: HangDetector,
        *,
        number: int = 0,
        name: str = "the engine",
        advice: str = "restart the server",
    ) -> None:
        self.number = number
        self.name = name
        self.limits = limits
        self.failure: str | None = None
        """Why the engine has exited; None while it runs."""
        self.num_restarts = 0
        self._advice = advice
        self._socket = socket
        self._heartbeat = heartbeat
        self._stats_wanted: list[asyncio.Future[CoreStats]] = []
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_questions = 0
        self._sent_pictures = OrderedDict[bytes, None]()
        """Digests of pictures; the last sent last."""

    def reconnect(self, socket: CoreSocket, limits: Limits, heartbeat: HangDetector) -> None:
        """Use a new engine process."""
        self._socket = socket
        self._heartbeat = heartbeat
        self.limits = limits
        self.failure = None
        self.num_restarts += 1
        self._sent_pictures.clear()

    def fail(self, reason: str) -> None:
        """Mark the engine as exited and fail all questions. The first reason is kept."""
        if self.failure is not None:
            return
        self.failure = f"{reason}; {self._advice}"
        for future in (*self._stats_wanted, *self._questions.values()):
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        self._stats_wanted.clear()

    def require_running(self) -> None:
        """Raise an EngineDeadError if the engine has exited."""
        if self.failure is not None:
            raise EngineDeadError(f"{self.name} has stopped: {self.failure}")

    def find_hang(self) -> str | None:
        """Return why the engine is considered hung; None if it is not, or has exited."""
        return self._heartbeat.find_hang() if self.failure is None else None

    def send(self, data: bytes) -> None:
        """Send an encoded message."""
        self._socket.send(data)

    def encode_submit(self, submissions: Sequence[Submission]) -> bytes:
        """Encode the message that runs sequences, without pictures that the engine has had: it asks for those that no
        hit covers. The caller sends it, if it sends those to other engines, too.

        Raises:
            RequestError: a text in it is not valid Unicode.
        """
        message = encode(Submit.of(submissions, self._sent_pictures))
        if self.limits.asks_for_pictures:
            for digest in (span.digest for each in submissions for span in each.pictures):
                self._sent_pictures[digest] = None
                self._sent_pictures.move_to_end(digest)
            while len(self._sent_pictures) > MAX_SENT_PICTURES:
                self._sent_pictures.popitem(last=False)
        return message

    async def receive(self) -> FromCore:
        """Return the next message."""
        message: FromCore = FROM_CORE.decode(await self._socket.recv())
        return message

    def take_answer(self, message: FromCore) -> None:
        """Give the answer to a question to those who wait for it. Other messages are ignored."""
        match message:
            case Stats(stats):
                for future in self._stats_wanted:
                    if not future.done():
                        future.set_result(stats)
                self._stats_wanted.clear()
            case (
                CacheShown(number, found)
                | Explained(number, found)
                | Flushed(number, found)
                | AdapterLoaded(number, found)
                | Controlled(number, found)
            ):
                asked = self._questions.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(found)

    async def ask_stats(self) -> CoreStats:
        """Return the engine's state.

        Raises:
            EngineDeadError: it has exited.
            RequestTimeoutError: it does not respond.
        """
        self._require_answers()
        future = asyncio.get_running_loop().create_future()
        self._stats_wanted.append(future)
        try:
            self.send(encode(AskStats()))
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats: CoreStats = await future
                return stats
        except TimeoutError as error:
            raise RequestTimeoutError(f"{self.name} has not answered for {STATS_TIMEOUT_S:g} s") from error
        finally:
            if future in self._stats_wanted:
                self._stats_wanted.remove(future)

    async def show_cache(self, salt: str) -> CacheState:
        """Return the cache's content under a salt. Raises as ``ask_stats``."""
        state: CacheState = await self._ask(lambda number: AskCache(number, salt))
        return state

    async def explain(self, question: CacheQuestion) -> CacheAnswer:
        """Return why a request missed, or what a prompt would hit. Raises as ``ask_stats``."""
        answer: CacheAnswer = await self._ask(lambda number: AskWhy(number, question))
        return answer

    async def load_adapter(self, name: str, path: str) -> LoadedAdapter:
        """Have the engine read a LoRA adapter.

        Raises:
            RequestError: it cannot be served; else as ``ask_stats``.
        """
        loaded: LoadedAdapter | str = await self._ask(lambda number: LoadAdapter(number, name, path), LOAD_TIMEOUT_S)
        if isinstance(loaded, str):
            raise RequestError(loaded, param="lora_path")
        return loaded

    async def control(self, action: Action) -> bool:
        """Have the engine do what is asked; return whether it did, when it has.

        Raises:
            RequestError: it cannot be done; else as ``ask_stats``.
            OutOfMemoryError: there is too little memory for it.
        """
        result: bool | str | LacksMemory = await self._ask(lambda number: Control(number, action), CONTROL_TIMEOUT_S)
        match result:
            case str():
                raise RequestError(result)
            case LacksMemory(reason):
                raise OutOfMemoryError(f"{self.name}: {reason}")
        return result

    async def flush(self) -> FlushReport | None:
        """Have the engine write entries that are only in memory to files; it accepts no more requests.

        Raises as ``ask_stats``.
        """
        report: FlushReport | None = await self._ask(Flush, FLUSH_S + ANSWER_TIMEOUT_S)
        return report

    def _require_answers(self) -> None:
        self.require_running()
        hang = self.find_hang()
        if hang is not None:
            raise RequestTimeoutError(f"{self.name} does not answer: {hang}")

    async def _ask(self, message: Callable[[int], ToCore], timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        self._require_answers()
        self._num_questions += 1
        number = self._num_questions
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self.send(encode(message(number)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise RequestTimeoutError(f"{self.name} has not answered for {timeout_s:g} s") from error
        finally:
            del self._questions[number]


def encode(message: ToCore) -> bytes:
    """Encode a message to an engine.

    Raises:
        RequestError: a text in it is not valid Unicode.
    """
    try:
        return ENCODER.encode(message)
    except UnicodeEncodeError as error:
        raise RequestError(f"the request has a text that is not valid Unicode: {error.reason}") from error
