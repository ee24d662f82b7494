"""Pauses, sleep and new weights of several engines: what lasts, and what a failure leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from strandline.errors import EngineError, OutOfMemoryError, RequestError
from strandline.records.control import DropWeights, Pause, PrepareWeights, ResetCache, Resume, Sleep, UseWeights, WakeUp
from strandline.records.events import CoreStats, Limits
from strandline.records.messages import ENCODER as TO_FRONT_END
from strandline.records.messages import TO_CORE, AskStats, Control, Controlled, Finish, LacksMemory, Stats
from strandline.records.sampling_params import SamplingParams
from strandline.server.engines.engine_client import EngineClient
from strandline.server.engines.engine_control import ASLEEP, PAUSED, EngineControl
from strandline.server.engines.engine_link import EngineLink
from strandline.server.engines.engine_weights import StaleWeightsError
from strandline.server.engines.metrics import Metrics
from strandline.server.engines.prompt import Prompt
from strandline.text.frontend import Frontend
from tests.cpu.server.test_queue import IDLE

LIMITS = Limits(1000, 100)
DIRECTORY = "/weights"


class Core:
    """An engine's end of the socket: records actions and answers them.

    Actions of the kind in ``refused`` are answered with a refusal, those of the kind in ``lacks_memory_for`` with too
    little memory, and those of the kind in ``unanswered`` not before ``answer``.
    """

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.finished: list[str] = []
        self.stats: CoreStats = IDLE
        self.refused: type | None = None
        self.lacks_memory_for: type | None = None
        self.unanswered: type | None = None
        self._held: list[bytes] = []
        self.asked = asyncio.Event()
        self._said: asyncio.Queue[bytes] = asyncio.Queue()

    def find_hang(self) -> str | None:
        return None

    def send(self, data: bytes) -> None:
        match TO_CORE.decode(data):
            case AskStats():
                self._said.put_nowait(TO_FRONT_END.encode(Stats(self.stats)))
            case Finish(names):
                self.finished += names
            case Control(number, action):
                self.actions.append(action)
                self.asked.set()
                result: bool | str | LacksMemory = "it cannot" if isinstance(action, self.refused or ()) else True
                if isinstance(action, self.lacks_memory_for or ()):
                    result = LacksMemory("it lacks memory")
                said = TO_FRONT_END.encode(Controlled(number, result))
                if isinstance(action, self.unanswered or ()):
                    self._held.append(said)
                else:
                    self._said.put_nowait(said)

    def answer(self) -> None:
        """Give the answers that were held, and hold no others."""
        self.unanswered = None
        for said in self._held:
            self._said.put_nowait(said)

    async def recv(self) -> bytes:
        return await self._said.get()

    def take(self) -> list[type]:
        """Return the kinds of actions since the last call."""
        taken, self.actions = self.actions, []
        return [type(action) for action in taken]


class Pair:
    """Two engines behind one client."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.cores = [Core(), Core()]
        links = [EngineLink(x, limits, x, number=i, name=f"engine {i}") for i, x in enumerate(self.cores)]
        self.client = EngineClient(
            links, Frontend(limits, eos_ids=frozenset({0})), Metrics("tiny", 2), max_unfinished=4
        )
        self.control = EngineControl(self.client)
        self.receiving = [asyncio.ensure_future(self.client.receive(engine)) for engine in links]

    def submit(self) -> Any:
        params = self.client.frontend.check_params(SamplingParams(max_tokens=20))
        return self.client.submit("job", [Prompt([1])], params)

    def restart(self, number: int) -> list[type]:
        """Return what an engine that is restarted is asked for."""
        return self.replace_core(number).take()

    def replace_core(self, number: int) -> Core:
        """Restart an engine; return its end of the socket."""
        core, engine = Core(), self.client.engines[number]
        self.client.reconnect(engine, core, LIMITS, core)
        self.receiving.append(asyncio.ensure_future(self.client.receive(engine)))
        return core

    def found(self) -> tuple[bool, bool, str | None]:
        return self.control.is_paused, self.control.is_sleeping, self.client.refusal


def run(check: Callable[[Pair], Awaitable[None]], limits: Limits = LIMITS) -> None:
    async def with_pair() -> None:
        pair = Pair(limits)
        try:
            await check(pair)
        finally:
            for each in pair.receiving:
                each.cancel()

    asyncio.run(asyncio.wait_for(with_pair(), 60))


def test_engines_that_hand_over_clear_nothing() -> None:
    async def check(pair: Pair) -> None:
        control, refused = pair.control, pytest.raises(RequestError, match="--kv-transfer-config")
        with pair.submit():
            for change in (
                control.pause("abort", clears=True),
                control.reset_cache(forced=True),
                control.sleep(1, "abort"),
                control.update_weights(DIRECTORY, "1", aborts=True),
            ):
                with refused:
                    await change
            assert pair.cores[0].take() == pair.cores[1].take() == []
            assert (pair.found(), pair.cores[0].finished) == ((False, False, None), [])
            assert not pair.client.state.was_reset
            await control.pause("keep", clears=None)
        assert [each.actions for each in pair.cores] == [[Pause(None)]] * 2

    run(check, replace(LIMITS, hands_over=True))


def test_engines_whose_weights_stay_refuse_before_requests_end() -> None:
    async def check(pair: Pair) -> None:
        with pair.submit():
            for change in (pair.control.sleep(2, "abort"), pair.control.update_weights(DIRECTORY, "1", aborts=True)):
                with pytest.raises(RequestError, match="--language-model-only"):
                    await change
            assert (pair.found(), pair.cores[0].finished) == ((False, False, None), [])
            await pair.control.sleep(1, "keep")
        assert pair.cores[1].take() == [Pause, Sleep]

    run(check, replace(LIMITS, changes_weights=False))


def test_pause_clears_by_default_where_it_can() -> None:
    async def check(pair: Pair) -> None:
        await pair.control.pause("keep", clears=None)
        assert all(action.epoch for core in pair.cores for action in core.actions)
        assert pair.client.state.was_reset

    run(check)


def test_reset_drops_all_caches_or_none() -> None:
    async def check(pair: Pair) -> None:
        pair.cores[1].stats = replace(IDLE, num_running=1)
        assert not await pair.control.reset_cache(forced=False)
        assert pair.cores[0].take() == pair.cores[1].take() == [Pause, Resume]
        assert not pair.client.state.was_reset
        pair.cores[1].stats = IDLE
        assert await pair.control.reset_cache(forced=False)
        assert pair.cores[0].take() == [Pause, ResetCache, Resume]
        await pair.control.pause("keep", clears=False)
        assert await pair.control.reset_cache(forced=True)
        assert pair.cores[1].take()[3:] == [Pause, ResetCache]

    run(check)


def test_restarted_engine_is_paused_or_asleep_as_the_others() -> None:
    async def check(pair: Pair) -> None:
        assert pair.restart(0) == []
        await pair.control.pause("keep", clears=False)
        assert pair.restart(1) == [Pause]

    async def check_sleep(pair: Pair) -> None:
        await pair.control.reset_cache(forced=True)
        await pair.control.sleep(1, "abort")
        await pair.control.pause("keep", clears=False)
        assert pair.found() == (True, True, ASLEEP)
        await pair.control.wake_up(["kv_cache"])
        restarted = pair.replace_core(1)
        assert restarted.actions[-1] == Sleep(1, ("weights",))
        assert restarted.take() == [ResetCache, Pause, Sleep]

    run(check)
    run(check_sleep)


@pytest.mark.parametrize("taker", [WakeUp, UseWeights])
def test_restarted_engine_keeps_what_the_others_are_taking(taker: type) -> None:
    async def check(pair: Pair) -> None:
        await pair.control.sleep(2, "keep")
        await pair.control.wake_up(["kv_cache"])
        pair.client.fail(pair.client.engines[1], "it was killed")
        pair.cores[0].take()
        pair.cores[0].unanswered = taker
        takes_weights = pair.control.wake_up(["weights"]), pair.control.update_weights(DIRECTORY, "1")
        taking = asyncio.ensure_future(takes_weights[taker is UseWeights])
        takes_weights[taker is not UseWeights].close()
        while taker not in pair.cores[0].take():
            await asyncio.sleep(0)
        assert pair.control.is_sleeping
        assert Sleep not in pair.restart(1)
        taking.cancel()
        await asyncio.wait([taking])
        assert pair.replace_core(1).actions[-1] == Sleep(2, ("weights",))

    run(check)


def test_engines_go_on_if_one_does_not_pause() -> None:
    async def check(pair: Pair) -> None:
        pair.cores[1].refused = Pause
        for change in (pair.control.reset_cache(forced=False), pair.control.update_weights(DIRECTORY, "1")):
            with pytest.raises(RequestError, match="it cannot"):
                await change
            assert pair.cores[0].take()[-2:] == [Pause, Resume]
            assert pair.found() == (False, False, None)

    run(check)


def test_engine_that_dies_does_not_fail_the_others() -> None:
    async def check(pair: Pair) -> None:
        pair.cores[1].send = lambda _: None  # type: ignore[method-assign]
        pausing = asyncio.ensure_future(pair.control.pause("keep", clears=False))
        await pair.cores[0].asked.wait()
        pair.client.fail(pair.client.engines[1], "it was killed")
        await pausing
        assert pair.found() == (True, False, None)
        assert pair.restart(1) == [Pause]

    run(check)


def test_requests_that_were_kept_are_waited_for() -> None:
    async def check(pair: Pair) -> None:
        with pair.submit():
            await pair.control.pause("keep", clears=False)
            waiting = asyncio.ensure_future(pair.control.pause("wait", clears=False))
            while Resume not in [type(action) for action in pair.cores[0].actions]:
                await asyncio.sleep(0)
            assert not waiting.done()
            assert pair.found() == (False, False, PAUSED)
            pair.client.abort()
            await waiting
        assert pair.cores[0].take() == [Pause, Resume, Pause]

    async def check_asleep(pair: Pair) -> None:
        with pair.submit():
            await pair.control.sleep(1, "keep")
            with pytest.raises(RequestError, match="while the server is asleep"):
                await pair.control.pause("wait", clears=False)
            assert pair.found() == (True, True, ASLEEP)

    run(check)
    run(check_asleep)


@pytest.mark.parametrize("is_paused", [False, True])
def test_weights_that_cannot_be_read_change_nothing(is_paused: bool) -> None:
    async def check(pair: Pair) -> None:
        if is_paused:
            await pair.control.pause("keep", clears=False)
        with pair.submit():
            before = pair.found()
            pair.cores[1].take(), pair.cores[0].take()
            pair.cores[1].refused = PrepareWeights
            with pytest.raises(RequestError, match="it cannot"):
                await pair.control.update_weights(DIRECTORY, "1", aborts=True, stays_paused=True)
            assert pair.cores[0].take() == pair.cores[1].take() == [PrepareWeights, DropWeights]
            assert (pair.found(), pair.cores[0].finished) == (before, [])
            assert not pair.client.state.was_reset

    run(check)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("stays_paused", [False, True])
def test_weights_wake_what_only_lacked_them(stays_paused: bool, aborts: bool) -> None:
    async def check(pair: Pair) -> None:
        await pair.control.sleep(2, "abort")
        await pair.control.wake_up(["kv_cache"])
        assert pair.found() == (True, True, ASLEEP)
        await pair.control.update_weights(DIRECTORY, "1", stays_paused=stays_paused, aborts=aborts)
        assert pair.found() == (stays_paused, False, PAUSED if stays_paused and aborts else None)
        kinds = [Pause, Sleep, WakeUp, PrepareWeights, Pause, UseWeights]
        assert pair.cores[0].take() == kinds + [Resume] * (not stays_paused)

    run(check)


@pytest.mark.parametrize("is_asleep", [False, True])
def test_engine_restarted_before_weights_are_used_is_not_asked_to(is_asleep: bool) -> None:
    async def check(pair: Pair) -> None:
        if is_asleep:
            await pair.control.sleep(2, "keep")
        pair.cores[0].unanswered = Pause
        updating = asyncio.ensure_future(pair.control.update_weights(DIRECTORY, "1"))
        while pair.cores[0].take()[-1:] != [Pause]:
            await asyncio.sleep(0)
        pair.client.fail(pair.client.engines[1], "it was killed")
        restarted = pair.replace_core(1)
        pair.cores[0].answer()
        await updating
        assert UseWeights in pair.cores[0].take()
        assert UseWeights not in (actions := restarted.take())
        assert not is_asleep or actions[-1:] == [WakeUp]
        assert pair.client.weights.versions == ["1", "default"]

    run(check)


def test_engine_restarted_after_it_used_weights_does_not_have_them() -> None:
    async def check(pair: Pair) -> None:
        pair.cores[0].unanswered = UseWeights
        updating = asyncio.ensure_future(pair.control.update_weights(DIRECTORY, "1"))
        while pair.cores[0].take()[-1:] != [UseWeights]:
            await asyncio.sleep(0)
        pair.client.fail(pair.client.engines[1], "it was killed")
        pair.replace_core(1)
        pair.cores[0].answer()
        await updating
        assert pair.client.weights.versions == ["1", "default"]

    run(check)


def test_weights_of_engines_that_all_restarted_are_not_used() -> None:
    async def check(pair: Pair) -> None:
        pair.cores[0].unanswered = pair.cores[1].unanswered = Pause
        updating = asyncio.ensure_future(pair.control.update_weights(DIRECTORY, "1"))
        while not all(core.take()[-1:] == [Pause] for core in pair.cores):
            await asyncio.sleep(0)
        for number in range(2):
            pair.client.fail(pair.client.engines[number], "it was killed")
            pair.replace_core(number)
        with pytest.raises(EngineError, match="send them again"):
            await updating
        assert pair.client.weights.versions == ["default", "default"]
        assert pair.found() == (False, False, None)
        with pair.submit():
            pass

    run(check)


def test_restarted_engine_answers_once_it_has_the_others_weights() -> None:
    async def check(pair: Pair) -> None:
        client = pair.client
        await pair.control.update_weights(DIRECTORY, "1")
        client.name_weights("first")
        client.fail(client.engines[0], "it was killed")
        pair.replace_core(0)
        assert (client.weights.versions, client.weights.version) == (["default", "first"], "first")
        with pair.submit() as job:  # the router of several engines is another test's
            assert client.version_of(job.streams[0]) == "default"
        client.fail(client.engines[1], "it was killed")
        for _ in range(2):
            with pytest.raises(StaleWeightsError, match="'first', which an engine that was restarted does not have"):
                pair.submit()
            assert client.weights.version == "default"
            pair.replace_core(1)
        await pair.control.update_weights(DIRECTORY, "2")
        assert client.weights.versions == ["2", "2"]
        with pair.submit() as job:
            assert client.version_of(job.streams[0]) == "2"

    run(check)


def test_memory_that_one_engine_lacks_is_taken_by_none() -> None:
    async def check(pair: Pair) -> None:
        await pair.control.sleep(2, "keep")
        await pair.control.wake_up(["weights"])
        pair.cores[0].take(), pair.cores[1].take()
        pair.cores[1].lacks_memory_for = WakeUp
        for memories, given_back in ((["kv_cache"], ("kv_cache",)), (["weights", "kv_cache"], ("kv_cache",))):
            with pytest.raises(OutOfMemoryError, match="engine 1: it lacks memory"):
                await pair.control.wake_up(memories)  # type: ignore[arg-type]
            for core in pair.cores:
                woken, slept = core.actions
                assert (woken, slept) == (WakeUp(("kv_cache",)), Sleep(2, given_back))
                core.take()
            assert pair.found() == (True, True, ASLEEP)
        pair.cores[1].lacks_memory_for = None
        await pair.control.wake_up(["kv_cache"])
        assert pair.found() == (False, False, None)

    run(check)


def test_weights_are_new_only_in_engines_with_memory_for_them() -> None:
    async def check(pair: Pair) -> None:
        await pair.control.sleep(2, "keep")
        pair.cores[1].lacks_memory_for = UseWeights
        with pytest.raises(OutOfMemoryError):
            await pair.control.update_weights(DIRECTORY, "1")
        assert pair.found() == (True, True, ASLEEP)
        await pair.control.wake_up(["weights", "kv_cache"])
        assert (pair.client.weights.versions, pair.found()) == (["1", "default"], (False, False, None))
        pair.cores[1].lacks_memory_for = None
        await pair.control.update_weights(DIRECTORY, "1")
        assert pair.client.weights.versions == ["1", "1"]

    run(check)
