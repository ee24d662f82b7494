"""The checker catches what is broken by hand: a checker that never fails proves nothing."""

from collections.abc import Callable

import pytest

from strandline.cache import Lease
from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.tiers.stored import Column
from strandline.cache.traversal import demoted_after, stored_keys
from strandline.cache.tree import Run, Snapshot
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS, NO_ADDRESS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, TokenBuffer
from tests.cpu.cache.device import runs
from tests.cpu.cache.driver import Driver
from tests.cpu.cache.test_lookup import prompt
from tests.cpu.cache.tiers.test_lower_tier import evict_all


class Scene:
    """A cache with two conversations that part inside a block, one of them running, and a follower."""

    def __init__(self) -> None:
        driver = Driver(40, 5, emits_events=True)
        self.cache = driver.cache
        self.memory = driver.cache.internals().memory
        driver.serve(prompt(200))
        driver.serve(prompt(300))
        self.lease: Lease = driver.admit(prompt(150) + prompt(80, 5000))
        driver.prefill(self.lease)
        self.follower: Lease = driver.admit([*prompt(150), *prompt(80, 5000), 1])
        self.root = driver.cache.internals().index.roots[""]
        (self.upper,) = self.root.children.values()
        self.run: Run = self.lease.run
        self.idle = next(run for run in runs(self.cache) if run.num_users == 0 and not run.is_tail)
        self.snapshots = [snapshot for _, _, snapshot in published_snapshots(self.cache)]
        self.branch: Snapshot = next(s for s in self.snapshots if s.is_in_child and s.home is self.upper)
        self.idle_snapshot = next(s for s in self.snapshots if s.num_readers == 0)


def test_scene_passes_every_check() -> None:
    check(Scene().cache)


def take_block(scene: Scene) -> None:
    scene.cache.internals().allocator.take_blocks(1)


def take_slot(scene: Scene) -> None:
    scene.cache.internals().allocator.take_slot()


def free_a_published_block(scene: Scene) -> None:
    scene.cache.internals().allocator.free_blocks(scene.idle.blocks[-1:])


def free_a_published_slot(scene: Scene) -> None:
    scene.cache.internals().allocator.free_slot(scene.idle_snapshot.slot)


def share_a_block(scene: Scene) -> None:
    scene.cache.internals().allocator.free_blocks(scene.idle.blocks[-1:])
    scene.idle.blocks[-1] = scene.run.blocks[0]


def share_a_slot(scene: Scene) -> None:
    scene.cache.internals().allocator.free_slot(scene.idle_snapshot.slot)
    scene.idle_snapshot.slot = scene.branch.slot


def write_to_a_published_slot(scene: Scene) -> None:
    scene.cache.internals().allocator.free_slot(scene.lease.dst)
    scene.lease.dst = scene.branch.slot


def miscount_blocks(scene: Scene) -> None:
    scene.memory.num_evictable_blocks += 1


def miscount_slots(scene: Scene) -> None:
    scene.memory.num_evictable_slots -= 1


def miscount_free_blocks(scene: Scene) -> None:
    scene.cache.internals().allocator.num_free_blocks += 1


def miscount_users(scene: Scene) -> None:
    scene.run.num_users += 1


def miscount_readers(scene: Scene) -> None:
    scene.branch.num_readers += 1


def miscount_waiters(scene: Scene) -> None:
    scene.idle_snapshot.num_waiters += 1


def forget_a_lease(scene: Scene) -> None:
    del scene.cache.internals().leases[scene.follower.request_id]


def change_the_tokens_of_a_path(scene: Scene) -> None:
    scene.upper.tokens[-1] ^= 1


def change_a_key(scene: Scene) -> None:
    scene.upper.tokens[0] ^= 1


def lengthen_a_run(scene: Scene) -> None:
    scene.run.tokens += b"\0\0\0\1"


def disorder_children(scene: Scene) -> None:
    scene.upper.child_keys.reverse()


def forget_in_the_order(scene: Scene) -> None:
    scene.upper.child_keys.pop()


def move_a_child(scene: Scene) -> None:
    scene.idle.start_block += 1


def adopt_a_child(scene: Scene) -> None:
    scene.idle.parent = scene.root


def change_a_table(scene: Scene) -> None:
    scene.follower.table[0], scene.follower.table[1] = scene.follower.table[1], scene.follower.table[0]


def publish_too_little(scene: Scene) -> None:
    scene.follower.num_published -= 1


def misplace_a_snapshot(scene: Scene) -> None:
    move_snapshot(scene.idle_snapshot, scene.idle_snapshot.key[0] + 1000, scene.idle_snapshot.key[1])


def move_snapshot(snapshot: Snapshot, num_blocks: int, rest: bytes) -> None:
    home = snapshot.home
    del home.snapshots[snapshot.key]
    snapshot.key = num_blocks, rest
    home.snapshots[snapshot.key] = snapshot
    home.keys[:] = sorted(home.snapshots)
    snapshot.position = num_blocks * BLOCK_TOKENS + len(rest) // TOKEN_BYTES


def forget_a_key(scene: Scene) -> None:
    scene.idle_snapshot.home.keys.clear()


def detach_a_snapshot(scene: Scene) -> None:
    scene.idle_snapshot.is_attached = False


def orphan_a_snapshot_between_children(scene: Scene) -> None:
    num_blocks, rest = scene.branch.key
    move_snapshot(scene.branch, num_blocks, rest[:-1] + bytes([rest[-1] ^ 1]))


def orphan_a_snapshot_inside_a_run(scene: Scene) -> None:
    inside = next(s for s in scene.snapshots if s.key[1] and not s.is_in_child)
    num_blocks, rest = inside.key
    move_snapshot(inside, num_blocks, rest[:-1] + bytes([rest[-1] ^ 1]))


def mislabel_a_snapshot(scene: Scene) -> None:
    scene.branch.position += 1


def resume_from_another_position(scene: Scene) -> None:
    scene.follower.computed -= 1


def read_another_slot(scene: Scene) -> None:
    scene.follower.src = scene.idle_snapshot.slot


def call_an_idle_run_live(scene: Scene) -> None:
    scene.idle.is_live = True


def lose_a_blocks_owner(scene: Scene) -> None:
    scene.memory.disown(scene.run.blocks[:1])


def swap_two_owners(scene: Scene) -> None:
    scene.memory.own(scene.idle, scene.run.blocks[:1])


def change_the_index_unnoticed(scene: Scene) -> None:
    snapshot = scene.cache.internals().index.find(scene.root, TokenBuffer(prompt(300)).data).snapshot
    assert snapshot is not None
    scene.memory.drop_snapshot(snapshot)
    scene.memory.revision -= 1


def empty_the_eviction_queue(scene: Scene) -> None:
    while scene.memory._queue.pop() is not None:
        pass


def announce_too_few_blocks(scene: Scene) -> None:
    scene.upper.num_announced -= 1


def announce_an_unneeded_block(scene: Scene) -> None:
    (tail,) = [run for run in runs(scene.cache) if run.is_tail and not run.is_live]
    tail.num_announced += 1


def forget_a_hash(scene: Scene) -> None:
    scene.upper.hashes.pop()


FAULTS: list[Callable[[Scene], None]] = [
    take_block,
    take_slot,
    free_a_published_block,
    free_a_published_slot,
    share_a_block,
    share_a_slot,
    write_to_a_published_slot,
    miscount_blocks,
    miscount_slots,
    miscount_free_blocks,
    miscount_users,
    miscount_readers,
    miscount_waiters,
    forget_a_lease,
    change_the_tokens_of_a_path,
    change_a_key,
    lengthen_a_run,
    disorder_children,
    forget_in_the_order,
    move_a_child,
    adopt_a_child,
    change_a_table,
    publish_too_little,
    misplace_a_snapshot,
    forget_a_key,
    detach_a_snapshot,
    orphan_a_snapshot_between_children,
    orphan_a_snapshot_inside_a_run,
    mislabel_a_snapshot,
    resume_from_another_position,
    read_another_slot,
    call_an_idle_run_live,
    lose_a_blocks_owner,
    swap_two_owners,
    change_the_index_unnoticed,
    empty_the_eviction_queue,
    announce_too_few_blocks,
    announce_an_unneeded_block,
    forget_a_hash,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_catches(fault: Callable[[Scene], None]) -> None:
    scene = Scene()
    fault(scene)
    with pytest.raises(CacheInvariantError):
        check(scene.cache)


class TierScene:
    """A cache whose tier holds all: two conversations that part inside a block."""

    def __init__(self) -> None:
        driver = Driver(40, 5, lower_blocks=(60,), emits_events=True)
        driver.serve(prompt(300))
        driver.serve(prompt(300) + prompt(90, 5000))
        evict_all(driver)
        self.cache = driver.cache
        (self.tier,) = driver.loads.tiers
        (root,) = self.tier.tree.roots.values()
        self.copies = sorted(self.tier.column.below(root), key=lambda copy: copy.position)
        (self.upper,) = demoted_after(root).values()
        run = self.copies[-1].snapshot.home
        assert run is not None
        self.run = run

        self.with_tail = next(copy for copy in self.copies if copy.tail_address)


def test_scene_with_tier_passes_every_check() -> None:
    check(TierScene().cache)


def miscount_a_tier(scene: TierScene) -> None:
    scene.tier.num_used -= 1


def miscount_snapshots_of_a_tier(scene: TierScene) -> None:
    scene.tier.num_snapshots += 1


def save_nothing(scene: TierScene) -> None:
    scene.copies[0].saved_tokens = 0


def lose_a_state(scene: TierScene) -> None:
    scene.copies[0].address = NO_ADDRESS


def lose_a_tail(scene: TierScene) -> None:
    scene.with_tail.tail_address = NO_ADDRESS


def move_to_another_tier(scene: TierScene) -> None:
    scene.copies[0].column = Column(0)


def pin_without_a_move(scene: TierScene) -> None:
    scene.copies[0].snapshot.num_pins += 1


def misplace_a_demoted_snapshot(scene: TierScene) -> None:
    scene.copies[0].snapshot.home = scene.run.parent if scene.copies[0].snapshot.home is scene.run else scene.run


def lose_a_block(scene: TierScene) -> None:
    scene.tier.column.addresses_in(scene.upper)[0] = NO_ADDRESS


def lose_the_last_block(scene: TierScene) -> None:
    scene.tier.column.addresses_in(scene.run)[-1] = NO_ADDRESS


def shorten_addresses(scene: TierScene) -> None:
    scene.tier.column.addresses_in(scene.run).pop()


def relink_a_child(scene: TierScene) -> None:
    scene.run.parent = None


def disorder_keys(scene: TierScene) -> None:
    stored_keys(scene.run).insert(0, (1000, b""))


def announce_too_few_demoted_blocks(scene: TierScene) -> None:
    scene.upper.num_announced -= 1


def use_a_demoted_run(scene: TierScene) -> None:
    scene.run.num_users += 1


def keep_an_unneeded_block(scene: TierScene) -> None:
    scene.run.tokens += bytes(BLOCK_KEY_BYTES)


def empty_the_tiers_queue(scene: TierScene) -> None:
    while scene.tier._queue.pop() is not None:
        pass


TIER_FAULTS: dict[Callable[[TierScene], None], str] = {
    miscount_a_tier: "stored blocks counted",
    miscount_snapshots_of_a_tier: "demoted snapshots, not",
    save_nothing: "is said to save 0 tokens",
    lose_a_state: "has address 0",
    lose_a_tail: "has tail 0",
    move_to_another_tier: "is in another tier",
    pin_without_a_move: "has 1 pins, not 0",
    misplace_a_demoted_snapshot: "belongs elsewhere",
    lose_a_block: "block 0 is neither in the tier nor on the device",
    lose_the_last_block: "is neither in the tier nor on the device",
    shorten_addresses: "addresses, a tier has",
    relink_a_child: "a child is linked wrongly",
    disorder_keys: "keys out of order",
    announce_too_few_demoted_blocks: "blocks announced, not",
    use_a_demoted_run: "is on the device, or something that follows it is",
    keep_an_unneeded_block: "no tier has its last block",
    empty_the_tiers_queue: "is not in the queue",
}


@pytest.mark.parametrize(("fault", "message"), TIER_FAULTS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_check_catches_in_a_tier(fault: Callable[[TierScene], None], message: str) -> None:
    scene = TierScene()
    fault(scene)
    with pytest.raises(CacheInvariantError, match=message):
        check(scene.cache)


@pytest.mark.parametrize("computed", [9, 10, 129, 201])
def test_commit_beyond_the_lease_is_an_error(computed: int) -> None:
    """Backwards, nothing, beyond the blocks, beyond the known tokens."""
    driver = Driver()
    lease = driver.admit(prompt(200))
    driver.step(lease, 10)
    driver.cache.extend(lease, 128)
    with pytest.raises(CacheInvariantError, match="request-1"):
        driver.cache.commit(lease, computed)
    assert lease.computed == 10
    driver.cache.extend(lease, 200)
    driver.cache.commit(lease, 200)
    driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
