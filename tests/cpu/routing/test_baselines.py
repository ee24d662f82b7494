"""The routers that know nothing of what is cached, and what all routers have in common."""

import pytest

from strandline.errors import ConfigError
from strandline.events.resumable import PromptHashes
from strandline.routing.names import ROUTERS, make_router
from strandline.routing.router import NoReplicaError
from tests.cpu.routing.replicas import Fleet

PREFIX = range(1000, 1300)


@pytest.mark.parametrize("name", ROUTERS)
def test_requests_of_a_replica_that_goes_are_named(name: str) -> None:
    router = make_router(name)
    with pytest.raises(NoReplicaError):
        router.route("early", PromptHashes(PREFIX))
    for replica in "abc":
        router.add(replica)
    where = {f"r{i}": router.route(f"r{i}", PromptHashes(range(i, i + 200))) for i in range(30)}
    assert set(where.values()) == set("abc")
    for request_id in ("r0", "r1", "unknown"):
        router.begin(request_id)
        router.finish(request_id)
    assert sorted(router.remove("b")) == sorted(r for r in where if where[r] == "b" and r not in ("r0", "r1"))
    assert router.remove("b") == []
    assert {router.route(f"s{i}", PromptHashes(range(i, i + 200))) for i in range(30)} == {"a", "c"}
    assert sorted(router.in_order()) == ["a", "c"]


def test_round_robin_takes_turns_while_replicas_come_and_go() -> None:
    router = make_router("round-robin")
    for replica in "abc":
        router.add(replica)
    prompt = PromptHashes(PREFIX)
    assert [router.route(str(i), prompt) for i in range(4)] == ["a", "b", "c", "a"]
    router.remove("b")
    assert [router.route(str(i), prompt) for i in range(4, 7)] == ["c", "a", "c"]


def test_power_of_two_takes_the_one_with_fewer_requests() -> None:
    router = make_router("power-of-two")
    router.add("a")
    router.add("b")
    chosen = [router.route(str(i), PromptHashes(PREFIX)) for i in range(10)]
    assert chosen.count("a") == 5


def test_prefix_tree_follows_what_was_sent_not_what_is_cached() -> None:
    fleet = Fleet(make_router("prefix-tree"))
    first = fleet.route(PREFIX)
    assert [fleet.route([*PREFIX, i]) for i in range(8)] == [first] * 8
    assert fleet.route([*PREFIX][:63] + [1] * 300) != first
    fleet.router.remove(first)
    assert fleet.route(PREFIX) != first


def test_prefix_tree_spreads_what_it_has_not_seen() -> None:
    fleet = Fleet(make_router("prefix-tree"))
    chosen = [fleet.route(range(10_000 * i, 10_000 * i + 300)) for i in range(9)]
    assert sorted(chosen) == sorted("abc" * 3)


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="prefix-tree"):
        make_router("nothing")
