"""The router sends a request where the tokens to recompute and the load are least together."""

from collections.abc import Sequence
from random import Random

import pytest

from strandline.cache.announcing.announcer import restate_events, take_events
from strandline.events.resumable import PromptHashes, ResumableIndex
from strandline.ids import BLOCK_TOKENS
from strandline.routing.router import NoReplicaError
from strandline.routing.snapshot_router import DECODE_TOKENS, LEAST_SHARE, SHARED_WORTH, SnapshotRouter
from tests.cpu.cache.history import History, pattern
from tests.cpu.cache.test_state_machine import random_event
from tests.cpu.routing.replicas import Fleet, on_the_wire

PREFIX = range(1000, 1200)


def fleet(num_replicas: int = 3) -> Fleet:
    return Fleet(SnapshotRouter(), num_replicas)


def test_prompt_goes_where_its_prefix_is_resumable() -> None:
    replicas = fleet()
    replicas.serve("c", PREFIX)
    assert replicas.route([*PREFIX, *range(50)], "x") == "c"
    replicas.end("x")
    assert replicas.route([*PREFIX, *range(60, 70)]) == "c"


@pytest.mark.parametrize(("lower_blocks", "chosen"), [(100, "b"), (0, "a")])
def test_prompt_goes_where_its_prefix_rests_below_the_device(lower_blocks: int, chosen: str) -> None:
    replicas = Fleet(SnapshotRouter(), 2, lower_blocks=lower_blocks)
    replicas.serve("a", [*PREFIX][:100])
    replicas.serve("b", PREFIX)
    replicas.evict_all("b")
    assert replicas.route([*PREFIX, 1]) == chosen


def test_deepest_snapshot_wins() -> None:
    replicas = fleet()
    replicas.serve("a", [*PREFIX][:100])
    replicas.serve("b", PREFIX)
    replicas.serve("c", [*PREFIX][:150])
    assert replicas.route([*PREFIX, 1]) == "b"


def test_prompts_that_part_are_computed_in_one_place() -> None:
    replicas = fleet()
    replicas.serve("c", PREFIX)
    # The only snapshot is at the end of the prefix, which this prompt leaves earlier.
    assert replicas.route([*PREFIX][:150] + [1] * 100) == "c"


def test_small_part_of_a_prompt_does_not_count() -> None:
    replicas = fleet(2)
    replicas.serve("a", PREFIX)
    assert replicas.route([*PREFIX, *range(1700)], "x") == "a"
    replicas.end("x")
    assert replicas.route([*PREFIX, *range(2000)]) == "b"


def test_emptiest_of_equal_replicas_is_filled() -> None:
    replicas = fleet(3)
    for name, num_tokens in (("a", 300), ("b", 100), ("c", 200)):
        replicas.serve(name, range(num_tokens))
    assert replicas.route(range(5000, 6000)) == "b"


def test_load_outweighs_a_hit_that_saves_less() -> None:
    replicas = fleet(2)
    replicas.serve("a", PREFIX)
    # One token and the load of the others on a, 201 tokens on b, which has no load.
    num_before = len(PREFIX) // (1 + DECODE_TOKENS) + 1
    assert [replicas.route([*PREFIX, 1]) for _ in range(num_before + 1)] == ["a"] * num_before + ["b"]


@pytest.mark.parametrize(("num_busy", "chosen"), [(0, "b"), (8, "a")])
def test_prompt_is_not_moved_among_busy_replicas(num_busy: int, chosen: str) -> None:
    replicas = fleet(2)
    replicas.serve("a", PREFIX)
    for number in range(2 * num_busy):
        replicas.route(range(10_000 * number, 10_000 * number + 300), f"busy {number}")
        replicas.router.begin(f"busy {number}")
    # Four more requests on a are a larger load than the prefix, unless those on b would wait for it.
    for number in range(4):
        replicas.route([*PREFIX, number], f"more {number}")
        replicas.router.begin(f"more {number}")
    assert replicas.route([*PREFIX, 9]) == chosen


def test_burst_of_unknown_prompts_is_spread_evenly() -> None:
    replicas = fleet(4)
    chosen = [replicas.route(range(10_000 * i, 10_000 * i + 300)) for i in range(1, 9)]
    assert sorted(chosen) == sorted("abcd" * 2)


def test_burst_does_not_herd_to_the_replica_with_the_prefix() -> None:
    replicas = fleet(4)
    replicas.serve("d", PREFIX)
    chosen = [replicas.route([*PREFIX, *range(10_000 * i, 10_000 * i + 600)]) for i in range(1, 17)]
    assert max(map(chosen.count, "abcd")) <= 5


def test_routed_prompt_counts_as_cached_until_it_is_forgotten() -> None:
    replicas = fleet(2)
    long = [*range(1000)]
    first = replicas.route(long, "first")
    other = next(name for name in "ab" if name != first)
    replicas.router.route("elsewhere", PromptHashes(range(5000, 5900)))
    assert replicas.route([*long, 1, 2], "second") == first
    replicas.end("second")
    replicas.end("elsewhere")
    replicas.router.begin("first")
    assert replicas.route([*long, 1, 2], "third") == first
    replicas.end("third")
    replicas.router.finish("first")
    assert replicas.route([*long, 1, 2], "fourth") == first
    replicas.end("fourth")
    replicas.end("first")
    # No event says that it is cached.
    assert replicas.route([*long, 1, 2]) == other


def test_first_token_and_end_give_reserved_tokens_back() -> None:
    replicas = fleet(2)
    assert [replicas.route([1] * 2000, "x"), replicas.route([2] * 1000, "y")] == ["a", "b"]
    replicas.router.begin("x")
    assert replicas.route([3] * 10, "z") == "a"
    replicas.end("y")
    assert list(replicas.router.in_order()) == ["b", "a"]


def test_cleared_replica_is_predicted_to_hit_nothing() -> None:
    replicas = fleet(2)
    replicas.serve("b", PREFIX)
    replicas.router.clear("b")
    assert replicas.route([*PREFIX, 1]) == "a"


def test_removed_replica_gets_nothing_and_its_requests_are_named() -> None:
    replicas = fleet(2)
    replicas.serve("b", PREFIX)
    assert replicas.route([*PREFIX, 1], "x") == "b"
    assert replicas.router.remove("b") == ["x"]
    assert replicas.router.remove("b") == []
    assert [replicas.route([*PREFIX, 1], name) for name in "yz"] == ["a", "a"]
    replicas.end("x")
    replicas.router.apply("b", on_the_wire(restate_events(replicas.drivers["b"].cache)))
    replicas.router.add("c")
    # The number of b is now that of c, which has nothing.
    assert replicas.route([*PREFIX, 1]) == "c"
    assert replicas.router.remove("a") == ["y", "z"]


def test_replica_is_added_once() -> None:
    replicas = fleet(1)
    replicas.serve("a", PREFIX)
    replicas.router.add("a")
    assert replicas.router.remove("a") == []
    with pytest.raises(NoReplicaError):
        replicas.route(PREFIX)


class Oracle:
    """What the router should know, replica by replica, without masks and orders."""

    def __init__(self, num_replicas: int) -> None:
        self.indices = {f"r{i}": ResumableIndex() for i in range(num_replicas)}
        self.reserved: dict[str, tuple[str, int, Sequence[int]]] = {}
        """By request: its replica, its tokens, and the blocks that it will compute."""

    def load(self, name: str) -> int:
        return sum(tokens for where, tokens, _ in self.reserved.values() if where == name)

    def hit(self, name: str, prompt: PromptHashes) -> int:
        pending = {block for where, _, blocks in self.reserved.values() if where == name for block in blocks}
        deepest = max((i + 1 for i, block in enumerate(prompt.blocks) if block in pending), default=0)
        hit = max(deepest * BLOCK_TOKENS, self.indices[name].hit_tokens(prompt))
        return hit if hit >= LEAST_SHARE * prompt.num_tokens else 0

    def least_requests(self, router: SnapshotRouter) -> int:
        """Return how many requests the replica that comes first has."""
        first = next(router.in_order())
        return sum(where == first for where, _, _ in self.reserved.values())

    def cost(self, name: str, prompt: PromptHashes, weight: int) -> float:
        hit, shared = self.hit(name, prompt), self.indices[name].matched_blocks(prompt) * BLOCK_TOKENS
        shared = shared if shared >= LEAST_SHARE * prompt.num_tokens else 0
        return weight * (prompt.num_tokens - hit - SHARED_WORTH * max(shared - hit, 0)) + self.load(name)


@pytest.mark.parametrize("num_replicas", [3, 30])
def test_choice_is_a_cheapest_of_all_replicas(num_replicas: int) -> None:
    choose = Random(num_replicas)
    router, oracle = SnapshotRouter(), Oracle(num_replicas)
    histories = {name: History(9, 5, emits_events=True) for name in oracle.indices}
    for name in histories:
        router.add(name)
    for step in range(150):
        for name in choose.sample(sorted(histories), 3):
            random_event(histories[name], choose)
            for event in on_the_wire(take_events(histories[name].cache)):
                router.apply(name, [event])
                oracle.indices[name].apply(event)
        base = choose.choice(sorted(histories))
        more = pattern(step, choose.choice([0, 9, 300]))
        prompt = PromptHashes([*choose.choice(histories[base].prompts), *more])
        weight = 1 + oracle.least_requests(router)
        avoided = choose.sample(["gone", *oracle.indices], choose.choice([0, 0, 1, 2, num_replicas + 1]))
        allowed = oracle.indices.keys() - avoided or oracle.indices.keys()
        chosen = router.route(f"q{step}", prompt, avoided)
        assert chosen in allowed
        assert oracle.cost(chosen, prompt, weight) == min(oracle.cost(name, prompt, weight) for name in allowed)
        num_hit = oracle.hit(chosen, prompt)
        tokens = prompt.num_tokens - num_hit + DECODE_TOKENS
        oracle.reserved[f"q{step}"] = chosen, tokens, prompt.blocks[num_hit // BLOCK_TOKENS :]
        for request_id in choose.sample(sorted(oracle.reserved), len(oracle.reserved) // 6):
            if choose.random() < 0.5:
                router.begin(request_id)
                where, tokens, blocks = oracle.reserved[request_id]
                oracle.reserved[request_id] = where, min(tokens, DECODE_TOKENS), blocks
            else:
                router.finish(request_id)
                router.forget(request_id)
                del oracle.reserved[request_id]
