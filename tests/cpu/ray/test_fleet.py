"""A fleet follows replicas that come, go and restart, and what their engines can resume."""

from pathlib import Path
from time import monotonic

import pytest

from strandline.cache.announcing.announcer import take_events
from strandline.events.publisher import EventPublisher
from strandline.events.resumable import PromptHashes
from strandline.kv_events_config import KVEventsConfig
from strandline.ray.fleet import Fleet, fleet_named
from strandline.records.messages import EventEndpoints
from strandline.routing.names import make_router
from strandline.routing.router import NoReplicaError
from tests.cpu.cache.driver import Driver

PROMPT = PromptHashes(range(1000))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(make_router("strandline"))


def publisher(folder: Path, name: str) -> EventPublisher:
    return EventPublisher(
        KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{folder}/{name}",
            replay_endpoint=f"ipc://{folder}/{name}-replay",
        )
    )


def endpoints(folder: Path, name: str) -> EventEndpoints:
    return EventEndpoints(f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay")


def goes_to(fleet: Fleet, name: str) -> bool:
    """Return whether the prompt is sent to a replica every time, within some seconds."""
    end_s = monotonic() + 10
    while monotonic() < end_s:
        if all(fleet.route("probe", PROMPT)[0] == name for _ in range(3)):
            fleet.finish("probe")
            return True
    return False


def test_prompt_goes_where_events_say_it_is_cached(fleet: Fleet, tmp_path: Path) -> None:
    driver = Driver(emits_events=True)
    driver.serve(range(1000))
    sender = publisher(tmp_path, "b")
    sender.publish(take_events(driver.cache))
    fleet.set_replicas({"a": None, "b": None})
    assert not all(fleet.route("probe", PROMPT)[0] == "b" for _ in range(3))
    fleet.set_replicas({"a": None, "b": endpoints(tmp_path, "b")})
    assert goes_to(fleet, "b")
    fleet.remove("b")
    assert goes_to(fleet, "a")
    fleet.set_replicas({"a": None, "c": endpoints(tmp_path, "b")})
    assert goes_to(fleet, "c")
    fleet.close()
    sender.close()


def test_all_replicas_are_returned_the_chosen_one_first(fleet: Fleet) -> None:
    fleet.set_replicas(dict.fromkeys("abc"))
    first = fleet.route("x", PROMPT)
    assert sorted(first) == ["a", "b", "c"]
    second = fleet.route("y", PROMPT)
    assert second[0] != first[0]
    assert second[-1] == first[0]


def test_next_turn_finds_the_last_one_before_its_events_come(fleet: Fleet) -> None:
    fleet.set_replicas(dict.fromkeys("abc"))
    [first, *_] = fleet.route("x", PROMPT)
    fleet.finish("x")
    assert fleet.route("y", PromptHashes(range(1001)))[0] == first


def test_request_that_is_routed_again_is_counted_once(fleet: Fleet) -> None:
    fleet.set_replicas(dict.fromkeys("ab"))
    for _ in range(5):
        fleet.route("x", PROMPT)
    fleet.begin("x")
    fleet.finish("x")
    chosen = [fleet.route(name, PromptHashes([index] * 100))[0] for index, name in enumerate("pq")]
    assert sorted(chosen) == ["a", "b"]


def test_fleet_without_replicas_refuses(fleet: Fleet) -> None:
    fleet.remove("unknown")
    with pytest.raises(NoReplicaError):
        fleet.route("x", PROMPT)


def test_fleets_are_shared_by_name() -> None:
    assert fleet_named("shared", "random") is fleet_named("shared", "random")
    assert fleet_named("shared", "random") is not fleet_named("other", "random")
