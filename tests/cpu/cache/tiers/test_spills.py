"""The persistent tier: what leaves host memory for it, what returns from it, and what a restart finds."""

import pytest

from strandline.cache.inspection.invariants import check
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.policy import resume_rules
from strandline.cache.policy.resume_rules import AT_SNAPSHOTS, AtTokens
from strandline.cache.resume import ResumeRule
from strandline.cache.tiers import LoadCosts
from strandline.cache.tiers.known_paths import FoundPath, KnownPaths
from strandline.cache.tiers.lower_tier import LowerTier
from strandline.cache.tiers.spills import MAX_BEGUN, spare_blocks
from strandline.cache.tiers.stored import TierSnapshot
from strandline.cache.traversal import continuations, demoted_after
from strandline.cache.tree import Run
from strandline.cache.walk import Walk, walk
from strandline.records.account import Miss, Reason
from strandline.records.offer import Offer
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, TokenBuffer
from tests.cpu.cache.driver import Driver, num_holds
from tests.cpu.cache.history import pattern
from tests.cpu.cache.tiers.test_lower_tier import evict_all

PROMPT = pattern(7, 400)
NEXT_TURN = [*PROMPT, *pattern(9, 200)]


def tiers(driver: Driver) -> tuple[LowerTier, LowerTier]:
    """Return the tier in host memory and the persistent one."""
    host, disk = driver.loads.tiers
    return host, disk


def end_spills(driver: Driver, *, is_done: bool = True) -> None:
    driver.flush()
    while driver.end_spill(is_done=is_done):
        pass


def spilled(
    *prompts: list[int], host: int = 13, disk: int = 100, rule: ResumeRule = AT_SNAPSHOTS, salt: str = ""
) -> Driver:
    """Return a driver that has served and evicted prompts, until all that fits is at rest in the persistent tier."""
    driver = Driver(lower_blocks=(host, disk), rule=rule)
    driver.loads.tiers[0].num_spare_blocks = host
    for prompt in prompts or (PROMPT,):
        driver.serve(prompt, salt=salt)
        evict_all(driver)
        end_spills(driver)
    return driver


def positions(tier: LowerTier) -> list[int]:
    return sorted(snapshot.position for snapshot in tier.snapshots())


def persisted_by(driver: Driver, *, lose: int = 0) -> PersistedEntries:
    """Return what the persistent tier of a driver holds.

    Args:
        lose: leave out the blocks before this one, counted from 1.
    """
    _, disk = tiers(driver)
    blocks, snapshots = [], []
    for tree, root in disk.tree.roots.items():
        waiting = [(root, b"", [root_hash(tree)])]
        while waiting:
            run, data, hashes = waiting.pop()
            path, addresses = data + run.tokens, disk.column.addresses_in(run)
            hashes = [*hashes, *block_hashes(hashes[-1], bytes(run.tokens))]
            for depth, address in enumerate(addresses, run.start_block + 1):
                if depth != lose and address:
                    key = path[(depth - 1) * BLOCK_KEY_BYTES : depth * BLOCK_KEY_BYTES]
                    blocks.append(PersistedBlocks(tree, hashes[depth - 1], key, (address,), 0, 0.0, False))
            waiting += [(child, path, hashes) for child in continuations(run)]
            for found in disk.column.copies(run):
                before, key = hashes[found.snapshot.num_blocks], found.snapshot.tail
                if found.address:
                    snapshots.append(
                        PersistedSnapshot(
                            tree, before, key, found.address, found.tail_address, found.kind, 0, 0.0, False
                        )
                    )
    return PersistedEntries(tuple(blocks), tuple(snapshots))


def restarted(driver: Driver, *, lose: int = 0, emits_events: bool = False) -> Driver:
    """Return a driver over what the persistent tier of another one holds; ``lose`` as above."""
    rule, num_blocks = driver.cache.internals().rule, tiers(driver)[1].num_blocks
    persisted = persisted_by(driver, lose=lose)
    new = Driver(lower_blocks=(13, num_blocks), persisted=persisted, rule=rule, emits_events=emits_events)
    new.device.stored |= driver.device.stored
    new.flush()
    return new


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_what_leaves_host_memory_returns_from_the_persistent_tier(rule: ResumeRule) -> None:
    driver = spilled(rule=rule)
    host, disk = tiers(driver)
    whole = 400 if rule.needs_slots else 384
    assert (positions(host), positions(disk)) == ([], [whole])
    assert (host.num_used, disk.num_used) == (0, 6 + 1 + 5 if rule.needs_slots else 6)
    assert driver.lookup([*PROMPT, 1]).misses[0] == Miss(Reason.DEMOTED, 0, whole)
    assert driver.bring_back([*PROMPT, 1])
    assert driver.serve([*PROMPT, 1]).hit == whole
    assert (disk.num_loads, disk.num_loaded_bytes, host.num_loads) == (1, disk.num_used, 0)


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_what_leaves_a_persistent_tier_returns_from_the_next(rule: ResumeRule, salt: str) -> None:
    driver = Driver(lower_blocks=(13, 60, 100), rule=rule)
    host, disk, far = driver.loads.tiers
    host.num_spare_blocks, disk.num_spare_blocks = host.num_blocks, disk.num_blocks
    driver.serve(PROMPT, salt=salt)
    evict_all(driver)
    for _ in range(2 * len(PROMPT) // 64):
        end_spills(driver)
    whole = 400 if rule.needs_slots else 384
    assert (positions(host), positions(disk), positions(far)[-1]) == ([], [], whole)
    assert (host.num_used, disk.num_used) == (0, 0)
    assert driver.lookup([*PROMPT, 1], salt).misses[0] == Miss(Reason.DEMOTED, 0, whole)
    assert driver.bring_back([*PROMPT, 1], salt)
    assert driver.serve([*PROMPT, 1], salt=salt).hit == whole
    assert (disk.num_loads, far.num_loads) == (0, 1)


def test_blocks_on_their_way_keep_what_needs_them() -> None:
    driver = Driver(lower_blocks=(60, 60, 100))
    host, disk, far = driver.loads.tiers
    host.num_spare_blocks = 0
    driver.serve(PROMPT)
    driver.serve(NEXT_TURN)
    evict_all(driver)
    host.num_spare_blocks, disk.num_spare_blocks = host.num_blocks, disk.num_blocks
    driver.flush()
    while driver.device.spilling:
        driver.end_spill(-1)
    assert (positions(host), positions(disk)) == ([], [])
    assert positions(far)[-1] == 600


def test_what_has_returned_stays_and_is_not_stored_again() -> None:
    driver = spilled()
    _, disk = tiers(driver)
    assert driver.bring_back(PROMPT)
    num_used = disk.num_used
    evict_all(driver)
    driver.flush()
    assert not driver.device.spilling
    assert (positions(disk), disk.num_used) == ([400], num_used)
    assert driver.bring_back(PROMPT)


def test_entries_of_the_disk_remember_returns_and_departures() -> None:
    driver = spilled()
    _, disk = tiers(driver)
    [copy] = disk.snapshots()
    before = copy.use
    assert driver.bring_back(PROMPT)
    assert copy.use == before.next(disk.now)
    driver.serve(PROMPT)
    [(_, _, snapshot)] = published_snapshots(driver.cache)
    use = snapshot.use
    evict_all(driver)
    end_spills(driver)
    assert (list(disk.snapshots()), copy.use) == ([copy], use)


def test_what_two_tiers_have_is_in_the_tree_once() -> None:
    driver = spilled(host=60)
    host, disk = tiers(driver)
    assert driver.bring_back(PROMPT)
    host.num_spare_blocks = 0
    evict_all(driver)
    [[host_copy], [disk_copy]] = host.snapshots(), disk.snapshots()
    assert host_copy.snapshot is disk_copy.snapshot
    assert host.is_stored(host_copy.snapshot)
    assert disk.is_stored(host_copy.snapshot)
    host.evict(host_copy)
    assert (host.num_used, positions(disk)) == (0, [400])
    assert disk.is_stored(disk_copy.snapshot)
    disk.evict(disk_copy)
    assert disk.num_used == 0
    assert not any(demoted_after(root) for root in disk.tree.roots.values())


def test_blocks_still_on_the_device_are_stored_with_the_snapshot() -> None:
    driver = Driver(lower_blocks=(13, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 13
    driver.serve(PROMPT)
    memory = driver.cache.internals().memory
    [snapshot] = [snapshot for _, _, snapshot in published_snapshots(driver.cache) if snapshot.position == 400]
    memory.drop_snapshot(snapshot)
    driver.flush()
    [spill] = driver.device.spilling.values()
    assert (len(spill.blocks), len(spill.stored)) == (6, 2), "whole blocks; the slot and the block that it lies in"
    assert num_holds(driver.cache) == 1
    driver.end_spill()
    assert (num_holds(driver.cache), positions(disk), positions(host)) == (0, [400], [])


def test_the_next_turn_adds_only_what_is_new() -> None:
    driver = spilled(PROMPT, NEXT_TURN, host=40)
    _, disk = tiers(driver)
    assert positions(disk)[-1] == 600
    slots = len(positions(disk))
    tails = sum(position % 64 > 0 for position in positions(disk))
    assert disk.num_used == 9 + tails + 5 * slots


def test_nothing_that_is_on_its_way_can_be_loaded() -> None:
    driver = Driver(lower_blocks=(13, 100))
    driver.loads.tiers[0].num_spare_blocks = 13
    driver.serve(PROMPT)
    evict_all(driver)
    host, disk = tiers(driver)
    match = driver.cache.internals().index.match("", TokenBuffer(PROMPT).data)
    assert match is not None
    assert disk.find(TokenBuffer(PROMPT).data, match) is None
    offer = driver.loads.tier_offer(TokenBuffer(PROMPT))
    assert offer is not None
    assert offer.store == "host"
    assert driver.load(PROMPT, offer) is not None
    assert (positions(host), host.num_used) == ([], 12), "the spill reads it still"
    end_spills(driver)
    assert (host.num_used, positions(disk)) == (0, [400])


def test_failed_spills_leave_nothing_behind() -> None:
    driver = Driver(lower_blocks=(13, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 13
    driver.serve(PROMPT)
    evict_all(driver)
    end_spills(driver, is_done=False)
    assert (positions(host), positions(disk), disk.num_used) == ([], [], 0)
    assert driver.lookup(PROMPT).hit == 0
    assert driver.loads.tier_offer(TokenBuffer(PROMPT)) is None


def test_failed_spills_spare_what_another_spill_brings() -> None:
    driver = Driver(lower_blocks=(60, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 0
    for prompt in (PROMPT, NEXT_TURN):
        driver.serve(prompt)
    evict_all(driver)
    copies = {copy.position: copy for copy in host.snapshots()}
    driver.loads.spills[0].spill(copies[400])
    [arriving] = disk.snapshots()
    disk.evict(arriving)
    driver.loads.spills[0].spill(copies[600])
    driver.flush()
    assert driver.end_spill(is_done=False)
    assert driver.end_spill()
    assert positions(disk) == [600]
    assert disk.is_stored(copies[600].snapshot)


def test_a_spill_whose_blocks_do_not_arrive_leaves_nothing_behind() -> None:
    driver = Driver(lower_blocks=(60, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 0
    for prompt in (PROMPT, NEXT_TURN):
        driver.serve(prompt)
    evict_all(driver)
    copies = {copy.position: copy for copy in host.snapshots()}
    for position in (400, 600):
        driver.loads.spills[0].spill(copies[position])
    driver.flush()
    assert driver.end_spill(is_done=False)
    assert driver.end_spill()
    assert (positions(disk), disk.num_used) == ([], 0)


def test_a_lost_last_block_takes_its_snapshot_along() -> None:
    driver = spilled()
    _, disk = tiers(driver)
    assert driver.load_from_tier(PROMPT) is not None
    [(transfer, action)] = driver.device.loading.items()
    driver.fail(transfer, lost=(action.blocks[-1][1],))
    assert (positions(disk), disk.num_used) == ([], 0)


def test_lost_blocks_take_along_what_needs_them() -> None:
    driver = spilled(PROMPT, NEXT_TURN, host=40)
    _, disk = tiers(driver)
    lead = driver.load_from_tier(NEXT_TURN)
    assert lead is not None
    [(transfer, action)] = driver.device.loading.items()
    driver.fail(transfer, lost=(action.blocks[2][1],))
    assert [position for position in positions(disk) if position >= 192] == []
    assert driver.loads.tier_offer(TokenBuffer(NEXT_TURN)) is None


class Lost(tuple[int, ...]):
    """Lost addresses that no one searches one by one."""

    __slots__ = ()

    def __contains__(self, address: object) -> bool:
        raise AssertionError("searched for each address")


def test_many_lost_places_are_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = spilled(PROMPT, NEXT_TURN, host=40)
    _, disk = tiers(driver)
    assert driver.load_from_tier(NEXT_TURN) is not None
    [(transfer, action)] = driver.device.loading.items()
    cut, cut_off = list[int](), disk.cut_off

    def spy(run: Run, num_blocks: int) -> None:
        cut.append(disk.column.addresses_in(run)[num_blocks - run.start_block - 1])
        cut_off(run, num_blocks)

    monkeypatch.setattr(disk, "cut_off", spy)
    lost = Lost(action.addresses[1:])
    driver.fail(transfer, lost)
    assert cut == [lost[0]], "what lies below is lost with the first of the path"
    assert [position for position in positions(disk) if position >= 128] == []


def test_loads_that_fail_for_a_moment_leave_what_rests() -> None:
    driver = spilled()
    _, disk = tiers(driver)
    assert driver.load_from_tier(PROMPT) is not None
    [transfer] = driver.device.loading
    driver.fail(transfer)
    assert positions(disk) == [400]
    assert driver.bring_back(PROMPT)


def test_what_would_not_be_loaded_is_not_stored() -> None:
    driver = Driver(lower_blocks=(13, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 13
    disk.costs.observe_load(1, 1.0)
    disk.costs.observe_prefill(1000, 1e-6)
    driver.serve(PROMPT)
    evict_all(driver)
    driver.flush()
    assert not driver.device.spilling
    assert (positions(host), positions(disk), disk.num_snapshots_refused > 0) == ([], [], True)


def test_what_would_not_be_loaded_costs_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(lower_blocks=(13, 100))
    host, disk = tiers(driver)
    host.num_spare_blocks = 13
    disk.costs.observe_load(1, 1.0)
    disk.costs.observe_prefill(1000, 1e-6)
    monkeypatch.setattr(TierSnapshot, "path", lambda self: pytest.fail("walked its path"))
    driver.serve(PROMPT)
    evict_all(driver)
    assert disk.num_snapshots_refused > 0


def flush(driver: Driver) -> None:
    """Write all that only memory has to the persistent tier, as a process does before it ends."""
    flush = driver.loads.begin_flush()
    assert flush is not None
    end_spills(driver)
    assert flush.num_left == 0


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_a_flush_stores_what_only_memory_has(rule: ResumeRule) -> None:
    driver = Driver(lower_blocks=(60, 300), rule=rule)
    others = [pattern(3, 150), [*PROMPT[:100], *pattern(4, 90)]]
    driver.serve(NEXT_TURN)
    evict_all(driver)
    for prompt in (PROMPT, *others):
        driver.serve(prompt, salt="tenant")
    flush(driver)
    for prompt in (PROMPT, *others):
        assert driver.lookup(prompt, "tenant").hit > 0, "the device keeps what it has"
    again = restarted(driver)
    for prompt in (PROMPT, *others):
        whole = len(prompt) if rule.needs_slots else len(prompt) // 64 * 64
        assert again.bring_back(prompt, "tenant")
        assert again.lookup(prompt, "tenant").hit == whole
    assert again.bring_back(NEXT_TURN)
    assert not again.bring_back(others[0])


def test_a_flush_writes_what_is_worth_most_first() -> None:
    driver = Driver(lower_blocks=(13, 12))
    driver.serve(pattern(3, 130))
    driver.serve(PROMPT)
    flush(driver)
    _, disk = tiers(driver)
    assert positions(disk) == [400]
    assert disk.num_snapshots_refused > 0


def test_a_flush_writes_nothing_twice() -> None:
    driver = spilled()
    assert driver.bring_back(PROMPT)
    flush(driver)
    assert driver.device.spilling == {}
    _, disk = tiers(driver)
    assert (positions(disk), disk.num_snapshots_demoted) == ([400], 1)


def test_a_flush_that_fails_leaves_nothing_behind() -> None:
    driver = Driver(lower_blocks=(13, 300))
    driver.serve(PROMPT)
    assert driver.loads.begin_flush() is not None
    end_spills(driver, is_done=False)
    _, disk = tiers(driver)
    assert (positions(disk), disk.num_used) == ([], 0)
    assert driver.lookup(PROMPT).hit == 400


def test_without_a_persistent_tier_there_is_no_flush() -> None:
    assert Driver(lower_blocks=(13,)).loads.begin_flush() is None


def test_a_lookup_and_the_offer_after_it_walk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = spilled(PROMPT, [*PROMPT, *pattern(3, 50)], NEXT_TURN, host=40)
    assert driver.bring_back(PROMPT)
    walks = list[bytes]()

    def counted(root: Run, data: bytearray) -> Walk:
        walks.append(bytes(data))
        return walk(root, data)

    monkeypatch.setattr(resume_rules, "walk", counted)
    prompt = TokenBuffer(NEXT_TURN)
    assert driver.cache.lookup(prompt).misses[0] == Miss(Reason.DEMOTED, 400, 600)
    offer = driver.loads.tier_offer(prompt)
    assert offer is not None
    assert (offer.position, walks) == (600, [bytes(prompt.data)])


def test_few_spills_begin_between_two_steps() -> None:
    driver = Driver(lower_blocks=(200, 400), num_slabs=80)
    host, _ = tiers(driver)
    host.num_spare_blocks = 0
    for seed in range(5):
        driver.serve(pattern(seed, 130))
        evict_all(driver)
    assert host.num_snapshots > 2 * MAX_BEGUN
    host.num_spare_blocks = 200
    for num_steps in (1, 2):
        driver.cache.take_actions()
        assert sum(map(len, driver.loads.spills)) == MAX_BEGUN * num_steps


@pytest.mark.parametrize("host_blocks", [120, 200])
def test_small_host_memory_has_room_for_a_prompts_snapshots(host_blocks: int) -> None:
    driver = Driver(lower_blocks=(host_blocks, 2000), num_slabs=80)
    host, disk = tiers(driver)
    host.num_spare_blocks = spare_blocks(host_blocks, 5, host.snapshot_blocks(400))
    for seed in range(20):
        for first, then in ((200, 0), (200, 80), (280, 80)):
            driver.serve([*pattern(seed, first), *pattern(seed + 50, then)])
        evict_all(driver)
        end_spills(driver)
    assert disk.num_snapshots > 0
    assert host.num_snapshots_evicted == 0, "room was made by passing on"


def test_spare_room_leaves_half_of_a_tiny_memory() -> None:
    assert [spare_blocks(num_blocks, 5, 0) for num_blocks in (10, 40, 60, 200, 1600)] == [5, 20, 30, 30, 100]


def test_spare_room_is_for_snapshots_with_windows() -> None:
    """A slab may be smaller than a snapshot."""
    assert [spare_blocks(num_blocks, 5, 40) for num_blocks in (40, 200, 1600)] == [20, 100, 240]


def test_the_least_valuable_snapshot_makes_room() -> None:
    driver = spilled(pattern(1, 130), pattern(2, 130), pattern(3, 400), disk=20)
    _, disk = tiers(driver)
    assert positions(disk)[-1] == 400
    assert disk.num_used <= 20
    assert disk.num_snapshots_evicted > 0


def test_the_tier_that_saves_most_time_is_read() -> None:
    driver = spilled(PROMPT, host=40)
    host, disk = tiers(driver)
    host.num_spare_blocks = 0
    assert driver.bring_back(PROMPT)
    evict_all(driver)
    assert (positions(host), positions(disk)) == ([400], [400])
    stores = []
    for host_rate, disk_rate in ((1000, 100), (100, 1000)):
        host.costs, disk.costs = LoadCosts(0.0, host_rate, 1.0), LoadCosts(0.0, disk_rate, 1.0)
        offer = driver.loads.tier_offer(TokenBuffer(PROMPT))
        assert isinstance(offer, Offer)
        stores.append(offer.store)
    assert stores == ["host", "disk"]


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_a_restart_finds_what_was_stored(rule: ResumeRule) -> None:
    driver = restarted(spilled(PROMPT, NEXT_TURN, host=40, rule=rule))
    _, disk = tiers(driver)
    whole = 600 if rule.needs_slots else 576
    assert positions(disk)[-1] == whole
    assert driver.lookup(NEXT_TURN).misses[0] == Miss(Reason.DEMOTED, 0, whole)
    assert driver.bring_back(NEXT_TURN)
    assert driver.serve([*NEXT_TURN, 1]).hit == whole
    deepest = max(disk.snapshots(), key=lambda snapshot: snapshot.position)
    above = max((position for position in positions(disk) if position < deepest.position), default=0)
    assert deepest.saved_tokens == deepest.position - above


OTHERS = 2**48
"""Where the addresses of another engine's files begin."""


def found_by_others(driver: Driver, others: Driver) -> PersistedEntries:
    """Return what the persistent tier of another engine holds, under addresses that a driver can load."""
    persisted = persisted_by(others)
    driver.device.stored |= {OTHERS + address: stored for address, stored in others.device.stored.items()}
    blocks = [
        each._replace(addresses=tuple(OTHERS + address for address in each.addresses)) for each in persisted.blocks
    ]
    snapshots = [
        each._replace(address=OTHERS + each.address, tail_address=OTHERS * (each.tail_address > 0) + each.tail_address)
        for each in persisted.snapshots
    ]
    return PersistedEntries(tuple(blocks), tuple(snapshots))


def whole_paths(persisted: PersistedEntries, rule: ResumeRule = AT_SNAPSHOTS) -> list[FoundPath]:
    """Return the paths that some files hold."""
    known = KnownPaths(has_snapshots=rule.needs_slots)
    known.add(persisted)
    return known.take(1000)


@pytest.mark.parametrize("rule", [AT_SNAPSHOTS, AtTokens()], ids=repr)
def test_what_others_store_enters_a_tier_in_use(rule: ResumeRule) -> None:
    driver, others = spilled(rule=rule), spilled(NEXT_TURN, pattern(3, 300), host=40, rule=rule)
    _, disk = tiers(driver)
    before = positions(disk)
    persisted, known = found_by_others(driver, others), KnownPaths(has_snapshots=rule.needs_slots)
    known.add(PersistedEntries(persisted.blocks[::2], persisted.snapshots))
    driver.loads.adopt(disk.store, (), known.take(100))
    known.add(PersistedEntries(persisted.blocks[1::2], ()))
    paths = known.take(100)
    assert [known.take(100), paths != []] == [[], True], "each path is found once, when it is whole"
    driver.loads.adopt(disk.store, (), paths)
    check(driver.cache)
    wanted = {*before, *positions(tiers(others)[1])}
    assert set(positions(disk)) == wanted if rule.needs_slots else set(positions(disk)) > wanted
    num_used = disk.num_used
    driver.loads.adopt(disk.store, (), paths)
    assert disk.num_used == num_used, "nothing enters twice"
    for prompt, whole in ((NEXT_TURN, 600 if rule.needs_slots else 576), (pattern(3, 300), 300 // 64 * 64)):
        assert driver.bring_back([*prompt, 1])
        assert driver.serve([*prompt, 1]).hit >= whole
    check(driver.cache)


def test_what_others_store_makes_room_by_worth() -> None:
    driver, others = spilled(disk=30), spilled(NEXT_TURN, pattern(3, 300), host=40)
    _, disk = tiers(driver)
    persisted = found_by_others(driver, others)
    driver.loads.adopt(disk.store, (), whole_paths(persisted))
    check(driver.cache)
    assert disk.num_snapshots_evicted > 0
    assert disk.num_used <= disk.num_blocks


def test_a_restart_drops_paths_that_are_not_whole() -> None:
    driver = restarted(spilled(PROMPT, NEXT_TURN, host=40), lose=3)
    _, disk = tiers(driver)
    assert [position for position in positions(disk) if position >= 192] == []
    assert disk.num_used == sum(5 + (position % 64 > 0) for position in positions(disk)) + (
        max(positions(disk), default=0) // 64
    )
    assert driver.loads.tier_offer(TokenBuffer(NEXT_TURN)) is None or positions(disk)


def test_a_restart_with_less_memory_keeps_what_is_worth_most() -> None:
    driver = spilled(pattern(1, 130), PROMPT, host=40)
    driver.loads.tiers[1].num_blocks = 12
    driver = restarted(driver)
    _, disk = tiers(driver)
    assert positions(disk) == [400]


def test_salts_hold_after_a_restart() -> None:
    driver = restarted(spilled(salt="tenant"))
    _, disk = tiers(driver)
    assert "tenant" not in str(list(disk.tree.roots))
    assert driver.loads.tier_offer(TokenBuffer(PROMPT)) is None
    assert Reason.DEMOTED not in {miss.reason for miss in driver.lookup(PROMPT, "other").misses}
    assert driver.bring_back(PROMPT, "tenant")
    assert driver.lookup(PROMPT, "tenant").hit == 400
