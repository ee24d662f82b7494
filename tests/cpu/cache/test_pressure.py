"""Scarce memory: what is evicted, what is kept, and that refused requests change nothing."""

import inspect
import sys
from array import array
from dataclasses import dataclass, field

import pytest

from strandline.cache import Lease, LogUse
from strandline.cache.eviction import Entry, EvictionQueue, resolve
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import new_cache
from strandline.cache.policy.worth import LeastRecentlyUsed
from strandline.cache.size import CacheSize
from strandline.cache.tree import Run, Snapshot
from strandline.errors import CacheInvariantError, ConfigError
from strandline.ids import RequestId
from strandline.records.account import SnapshotKind
from strandline.records.actions import MoveBlock
from strandline.records.tokens import TokenBuffer, encode
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.history import fingerprint
from tests.cpu.cache.test_lookup import prompt
from tests.cpu.cache.test_reasons import SnapshotsFirst


def test_evicted_snapshot_is_freed_after_its_last_reader() -> None:
    driver = Driver(6, 1)
    driver.serve(prompt(30))
    follower = driver.admit([*prompt(30), 1])
    other = driver.admit(prompt(30, 5000))
    driver.prefill(other, leave=False)
    assert published(driver.cache) == set()
    assert driver.device.state(follower.src) == tuple(prompt(30))
    assert follower.src != follower.dst
    source = follower.src
    driver.prefill(follower, leave=False)
    driver.flush()
    assert driver.device.state(source) is None


def test_path_of_a_running_request_is_not_evicted() -> None:
    driver = Driver(8, 1)
    driver.serve(prompt(128))
    lease = driver.admit([*prompt(128), 1])
    table = array("i", lease.table)
    assert driver.try_admit(prompt(300, 5000), step_tokens=300) is None
    other = driver.admit(prompt(64, 5000))
    assert driver.cache.extend(other, 64)
    assert not driver.cache.extend(other, 300)
    assert lease.table == table
    driver.prefill(lease, leave=False)


def scatter(driver: Driver) -> tuple[Lease, Lease]:
    """Let two requests take blocks by turns, so that each slab holds some of either."""
    stays, goes = driver.admit(prompt(500)), driver.admit(prompt(500, 5000))
    for end in range(64, 321, 64):
        assert driver.cache.extend(goes, end)
        assert driver.step(stays, end)
    assert driver.cache.extend(goes, 384)
    return stays, goes


def num_moves(driver: Driver) -> int:
    """Return how many blocks are to be moved, and move them."""
    moves = [action for action in driver.cache.internals().memory.actions if isinstance(action, MoveBlock)]
    driver.flush()
    return len(moves)


def test_compaction_makes_room_for_a_slot_and_tables_follow() -> None:
    driver = Driver(5, 4)
    stays, goes = scatter(driver)
    driver.release(goes, SnapshotKind.PREEMPTION)
    assert (driver.cache.internals().allocator.num_free_slabs, driver.cache.internals().allocator.num_free_blocks) == (
        1,
        6,
    )
    before = list(stays.table)
    newcomers = [driver.admit(prompt(10, 7000)), driver.admit(prompt(10, 8000))]
    assert sum(old != new for old, new in zip(before, stays.table, strict=True)) == num_moves(driver) == 2
    driver.step_together([(stays, 330), *((lease, 10) for lease in newcomers)])
    driver.drain()


def test_shared_blocks_move_in_all_tables_and_in_the_index() -> None:
    driver = Driver(7, 4)
    stays, goes = scatter(driver)
    assert driver.cache.leave_snapshot(stays, SnapshotKind.PROMPT_END)
    driver.release(goes, SnapshotKind.PREEMPTION)
    before = list(stays.table)
    follower = driver.admit([*prompt(320), 1])
    other = driver.admit([*prompt(150), 3])
    driver.admit(prompt(10, 7000))
    assert num_moves(driver) == 2
    assert list(stays.table) == list(follower.table) != before
    assert list(other.table) == list(stays.table[:2])
    driver.step_together([(follower, 321), (other, 151)])
    assert driver.lookup(prompt(320)).hit == 320


def test_refused_admission_evicts_nothing() -> None:
    driver = Driver(6, 1)
    driver.serve(prompt(40))
    lease = driver.admit(prompt(100, 5000))
    driver.flush()
    before = fingerprint(driver)
    assert driver.try_admit(prompt(1000, 9000), step_tokens=1000) is None
    assert fingerprint(driver) == before
    assert not driver.cache.extend(lease, 1000)
    assert fingerprint(driver) == before


def test_cut_without_a_slot_is_omitted_and_evicts_nothing() -> None:
    driver = Driver(3, 4, order=SnapshotsFirst())
    driver.serve(prompt(100))
    lease = driver.admit(prompt(90) + prompt(300, 6000))
    assert driver.cache.extend(lease, 384)
    driver.flush()
    assert driver.cache.internals().memory.num_evictable_blocks == 1
    assert driver.cache.reserve_step(lease, 384, LogUse.NONE).cuts == ()
    assert driver.cache.take_actions() == []
    assert driver.step(lease, 384)


def test_cut_of_an_uncommitted_step_leaks_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(100))
    before = driver.cache.internals().allocator.used()
    lease = driver.admit(prompt(90) + prompt(100, 6000))
    assert driver.cache.extend(lease, 190)
    assert [position for position, _ in driver.cache.reserve_step(lease, 190, LogUse.NONE).cuts] == [90]
    driver.release(lease)
    assert driver.cache.internals().allocator.used() == before


def test_snapshot_is_left_only_with_room_for_the_next_token() -> None:
    """Else a lone request would hold its snapshot, lack a block, and never go on."""
    driver = Driver(4, 1)
    lease = driver.admit(prompt(64))
    driver.prefill(lease, leave=False)
    assert not driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    driver.decode(lease, [1])
    driver = Driver(5, 1)
    lease = driver.admit(prompt(64))
    driver.prefill(lease)
    assert not lease.has_own_state
    driver.decode(lease, [1])


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 129])
def test_lone_request_that_fits_is_always_admitted_again(num_tokens: int) -> None:
    num_blocks = -(-(num_tokens + 1) // 64)
    driver = Driver(num_blocks + 2, 1)
    for _ in range(3):
        driver.serve(prompt(num_tokens), generated=[1])
        driver.serve([*prompt(num_tokens - 1), 7], generated=[2])
        driver.serve([*prompt(num_tokens), 1])
        driver.serve(prompt(num_tokens, 5000), generated=[1])


def test_too_small_arena_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="raise --memory"):
        new_cache(CacheSize(1, 5))


@pytest.mark.parametrize(("num_slabs", "num_gone"), [(130, 5), (32, 2), (6, 1)])
def test_unneeded_blocks_are_evicted_by_the_slot(num_slabs: int, num_gone: int) -> None:
    driver = Driver(num_slabs, 5)
    driver.serve(prompt(640))
    memory, allocator = driver.cache.internals().memory, driver.cache.internals().allocator
    for _, _, snapshot in list(published_snapshots(driver.cache)):
        memory.drop_snapshot(snapshot)
    memory.take_blocks(allocator.num_free_blocks + 5 * allocator.num_free_slabs)
    assert memory.num_blocks_evicted == 0
    assert len(memory.take_blocks(1)) == 1
    assert memory.num_blocks_evicted == num_gone
    assert len(memory.take_blocks(7)) == 7
    assert memory.num_blocks_evicted >= 8


def test_least_recently_used_goes_first_and_hits_are_uses() -> None:
    driver = Driver(8, 1)
    for first in (1000, 2000, 3000):
        driver.serve(prompt(20, first))
    assert driver.lookup(prompt(21, 1000)).hit == 20
    lease = driver.admit(prompt(20, 2000))
    driver.release(lease)
    driver.serve(prompt(20, 4000))
    assert {tokens[0] for _, tokens in published(driver.cache)} == {2000, 3000, 4000}


@dataclass
class Favourites:
    """An order whose ranking a test sets."""

    dear: set[int] = field(default_factory=set)

    def worth(self, entry: Entry) -> float:
        run = entry.home if isinstance(entry, Snapshot) else entry
        while run.parent is not None and run.parent.parent is not None:
            run = run.parent
        key = bytes(run.tokens) or (entry.key[1] if isinstance(entry, Snapshot) else b"")
        return float(int.from_bytes(key[:4], "big") in self.dear)


@pytest.mark.parametrize("dear", [1000, 2000, 3000])
def test_custom_eviction_order_is_followed(dear: int) -> None:
    driver = Driver(7, 1, order=Favourites({dear}))
    for first in (1000, 2000, 3000):
        driver.serve(prompt(20, first))
    driver.serve(prompt(70, 9000))
    assert driver.lookup(prompt(20, dear)).hit == 20
    assert len({tokens[0] for _, tokens in published(driver.cache)} & {1000, 2000, 3000}) == 1


def test_order_may_change_its_ranking_of_queued_entries() -> None:
    order = Favourites()
    driver = Driver(8, 1, order=order)
    for first in (1000, 2000, 3000):
        driver.serve(prompt(20, first))
    order.dear = {1000}
    driver.serve(prompt(20, 9000))
    assert driver.lookup(prompt(20, 1000)).hit == 20
    driver.drain()


def test_stale_offers_are_pruned() -> None:
    queue = EvictionQueue(LeastRecentlyUsed(), lambda _: True)
    entries = [Run(None, 0, b"", array("i")) for _ in range(100)]
    for offer in range(20_000):
        queue.push(entries[offer % 100])
    assert len(queue) <= 4 * 100 + 1024
    assert [queue.pop() for _ in range(101)] == [*entries, None]


def chat_trace(num_chats: int, num_turns: int) -> list[list[int]]:
    """Return the prompts of conversations that take turns; each prompt repeats all before it."""
    system = prompt(130, 100_000)
    chats = [[*system, *prompt(30 + 7 * chat, 1000 * chat)] for chat in range(num_chats)]
    trace = []
    for turn in range(num_turns):
        for chat in range(num_chats):
            trace.append(list(chats[chat]))
            chats[chat] += prompt(50 + turn, 200_000 + 10_000 * chat + 1000 * turn)
    return trace


def hit_tokens(num_slabs: int, trace: list[list[int]]) -> int:
    driver = Driver(num_slabs, 5)
    return sum(driver.serve(tokens).hit for tokens in trace)


def test_more_memory_never_lowers_the_hits_of_a_chat_trace() -> None:
    trace = chat_trace(4, 5)
    hits = [hit_tokens(num_slabs, trace) for num_slabs in range(6, 30)]
    assert hits == sorted(hits)
    assert hits[-1] > 1.5 * hits[0]


def test_every_turn_of_conversations_hits_all_but_new_tokens() -> None:
    driver = Driver(200, 5)
    chats = [prompt(40 + 37 * chat, 1000 * chat) for chat in range(8)]
    for turn in range(6):
        for chat in range(len(chats)):
            seen = len(chats[chat]) if turn else 0
            chats[chat] += prompt(11 + 13 * turn, 100_000 + 1000 * turn + chat)
            answer = prompt(5 + 7 * chat, 200_000 + 1000 * turn)
            account = driver.serve(chats[chat], generated=answer, chunk=64)
            assert account.hit == seen
            chats[chat] += answer
    driver.drain()


def test_conversation_stays_one_run() -> None:
    """So that a lookup costs its branches, not its turns."""
    driver = Driver(300, 5)
    tokens = prompt(70)
    for turn in range(40):
        driver.serve(tokens)
        tokens = tokens + prompt(37, 1000 * turn + 5000)
    runs = [run for root in driver.cache.internals().index.roots.values() for run in root.children.values()]
    assert len(runs) == 1
    assert sum(not child.is_tail for child in runs[0].children.values()) == 0
    assert len(published(driver.cache)) == 40


def test_deep_trees_are_read_without_recursion() -> None:
    cache = new_cache(CacheSize(3000, 5))
    shared = encode(prompt(64))
    for turn in range(300):
        for token in (1, 2):
            tokens = TokenBuffer()
            tokens.data += shared + encode([token])
            lease = cache.admit(RequestId(f"{turn}-{token}"), tokens)
            assert lease is not None
            cache.extend(lease, len(tokens))
            cache.commit(lease, len(tokens))
            cache.release(lease, SnapshotKind.GENERATION_END)
        shared += encode(prompt(64, 100_000 + turn))
        cache.take_actions()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert len(list(published_snapshots(cache))) == 600
        check(cache)
    finally:
        sys.setrecursionlimit(limit)


def test_releasing_twice_is_an_error() -> None:
    driver = Driver()
    lease = driver.admit(prompt(10))
    driver.release(lease)
    with pytest.raises(CacheInvariantError, match="request-1 has no lease"):
        driver.release(lease)


def test_expected_hit_of_a_waiting_request_is_evicted_last() -> None:
    """Though it saves least, and whatever else comes meanwhile."""
    driver = Driver(12, 5)
    driver.serve(prompt(130))
    driver.cache.expect(RequestId("waiter"), TokenBuffer(prompt(140)))
    for index in range(20):
        driver.serve(prompt(600, 10_000 * (index + 1)))
    assert driver.lookup(prompt(140)).hit == 130
    driver.cache.forget(RequestId("waiter"))
    for index in range(20):
        driver.serve(prompt(600, 10_000 * (index + 31)))
    assert driver.lookup(prompt(140)).hit == 0


def test_running_requests_may_evict_an_expected_hit() -> None:
    driver = Driver(6, 5)
    driver.serve(prompt(600))
    driver.cache.expect(RequestId("waiter"), TokenBuffer(prompt(640)))
    driver.serve(prompt(1200, 10_000))
    assert driver.lookup(prompt(640)).hit == 0
    check(driver.cache)


def test_waiting_request_moves_to_the_replacement_of_an_evicted_snapshot() -> None:
    driver = Driver(12, 5)
    driver.serve(prompt(130))
    driver.serve(prompt(300))
    waiter = RequestId("waiter")
    driver.cache.expect(waiter, TokenBuffer(prompt(310)))
    [deepest] = [snapshot for _, _, snapshot in published_snapshots(driver.cache) if snapshot.position == 300]
    driver.cache.internals().memory.drop_snapshot(deepest)
    check(driver.cache)
    assert resolve(deepest) not in (None, deepest)
    driver.admit(prompt(310), waiter)
    assert driver.cache.internals().expected == {}
