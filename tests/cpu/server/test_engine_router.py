"""Which engine a prompt is sent to. How costs are weighed is tested with the router itself."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from strandline.cache.announcing.announcer import take_events
from strandline.events.wire import encode_batch
from strandline.routing.router import NoReplicaError
from strandline.server.engines import engine_router
from strandline.server.engines.engine_router import EngineRouter
from tests.cpu.cache.driver import Driver

LONG = range(1000)


def run(test: Callable[[EngineRouter], Awaitable[None]], num_engines: int = 2) -> None:
    async def with_router() -> None:
        await test(EngineRouter(range(num_engines)))

    asyncio.run(with_router())


def events_of(prompt: range, salt: str = "") -> bytes:
    """Return the events of a cache that has served a prompt."""
    driver = Driver(emits_events=True)
    driver.serve(prompt, salt=salt)
    return encode_batch(0.0, take_events(driver.cache))


def test_a_burst_is_spread_before_anything_runs() -> None:
    async def check(router: EngineRouter) -> None:
        chosen = [router.route(str(number), range(number * 1000, number * 1000 + 100), "") for number in range(8)]
        assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]

    run(check, num_engines=4)


def test_a_prompt_goes_where_events_say_it_is() -> None:
    async def check(router: EngineRouter) -> None:
        router.apply(1, events_of(LONG))
        assert {router.route("a", LONG, "") for _ in range(3)} == {1}

    run(check)


def test_a_salt_hides_what_is_cached_without_it() -> None:
    async def check(router: EngineRouter) -> None:
        router.apply(1, events_of(LONG, salt="x"))
        assert router.route("a", LONG, "") == 0
        router.finish("a")
        assert router.route("b", LONG, "x") == 1

    run(check)


@pytest.mark.parametrize("has_cache", [True, False])
def test_prompts_share_nothing_without_a_cache(*, has_cache: bool) -> None:
    router = EngineRouter(range(2), has_cache=has_cache)
    first = router.route("a", LONG, "")
    router.begin("a")
    assert (router.route("b", LONG, "") == first) == has_cache


def test_a_turn_finds_the_last_one_before_its_events() -> None:
    async def check(router: EngineRouter) -> None:
        first = router.route("a", LONG, "")
        router.finish("a")
        router.route("other", range(5000, 5010), "")
        assert router.route("b", range(1010), "") == first

    run(check)


def test_an_ended_prompt_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_router, "FORGET_AFTER_S", 0.0)

    async def check(router: EngineRouter) -> None:
        first = router.route("a", LONG, "")
        router.finish("a")
        for _ in range(3):
            await asyncio.sleep(0)
        assert router.route("b", LONG, "") != first

    run(check)


def test_a_hung_engine_gets_prompts_only_if_all_hang() -> None:
    async def check(router: EngineRouter) -> None:
        router.apply(1, events_of(LONG))
        assert router.route("a", LONG, "", hung=[1]) == 0
        assert router.route("b", LONG, "", hung=[0, 1]) == 1

    run(check)


def test_a_removed_engine_gets_nothing_until_it_returns() -> None:
    async def check(router: EngineRouter) -> None:
        router.apply(1, events_of(LONG))
        router.remove(1)
        assert router.route("a", LONG, "") == 0
        router.add(1)
        assert router.route("b", range(3000, 4000), "") == 1
        router.remove(0)
        router.remove(1)
        with pytest.raises(NoReplicaError):
            router.route("c", LONG, "")

    run(check)
