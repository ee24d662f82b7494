"""How requests share blocks and snapshots, and how they part."""

import pytest

from strandline.errors import CacheInvariantError
from strandline.records.account import SnapshotKind
from strandline.records.actions import CopyTokens
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver, published
from tests.cpu.cache.test_lookup import prompt


@pytest.mark.parametrize("position", [1, 63, 65, 100, 127])
def test_resume_inside_a_block_copies_only_its_first_tokens(position: int) -> None:
    driver = Driver()
    owner = driver.admit(prompt(position))
    driver.prefill(owner)
    follower = driver.admit([*prompt(position), 1])
    (copy,) = [action for action in driver.cache.take_actions() if isinstance(action, CopyTokens)]
    assert copy == CopyTokens(owner.table[-1], follower.table[-1], position % 64)  # type: ignore[arg-type]
    assert follower.table[:-1] == owner.table[:-1]
    driver.device.apply([copy])
    assert driver.device.cells(copy.dst)[position % 64 :] == [-1] * (64 - position % 64)


@pytest.mark.parametrize("position", [64, 128])
@pytest.mark.parametrize("num_more", [0, 30])
def test_resume_between_blocks_copies_nothing(position: int, num_more: int) -> None:
    """Not even when some tokens of the next block are cached."""
    driver = Driver()
    driver.serve(prompt(position))
    driver.serve(prompt(position + num_more + 10))
    lease = driver.admit([*prompt(position + num_more), 1])
    assert lease.account.kv_tokens == position + num_more
    assert len(lease.table) == position // 64
    assert not [action for action in driver.cache.take_actions() if isinstance(action, CopyTokens)]
    assert driver.step(lease, position + 1)


def test_owner_and_borrower_of_a_block_stay_independent() -> None:
    driver = Driver()
    owner = driver.admit(prompt(100))
    driver.prefill(owner)
    follower = driver.admit([*prompt(100), 1])
    for token in range(70):
        driver.decode(owner, [2000 + token])
        driver.prefill(follower, leave=False)
        driver.decode(follower, [4000 + token])
    driver.flush()
    driver.release(owner)
    driver.release(follower)
    assert driver.lookup(prompt(100) + prompt(70, 2000)).hit == 170
    assert driver.lookup([*prompt(100), 1, *prompt(70, 4000)]).hit == 171


def test_follower_aborted_before_its_first_step_leaks_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(100))
    allocator = driver.cache.internals().allocator
    before = (allocator.num_blocks, allocator.num_slots, published(driver.cache))
    follower = driver.admit([*prompt(100), 1])
    driver.release(follower)
    assert (allocator.num_blocks, allocator.num_slots, published(driver.cache)) == before
    driver.drain()


def test_copied_block_can_be_evicted_after_the_copy_is_issued() -> None:
    """The copy comes before the drop, whatever is evicted in between."""
    driver = Driver(6, 1)
    driver.serve(prompt(30))
    follower = driver.admit([*prompt(30), 1])
    other = driver.admit(prompt(30, 5000))
    assert driver.cache.extend(other, 30)
    assert published(driver.cache) == set()
    driver.prefill(follower, leave=False)
    driver.prefill(other, leave=False)


def test_requests_that_compute_the_same_tokens_keep_one_copy() -> None:
    driver = Driver()
    leases = [driver.admit(prompt(200)), driver.admit(prompt(200))]
    driver.step_together([(lease, 100) for lease in leases])
    driver.step_together([(lease, 200) for lease in leases])
    assert leases[0].table[:3] == leases[1].table[:3]
    assert driver.cache.internals().allocator.num_blocks == 3 + 2
    for lease in leases:
        driver.release(lease)
    assert driver.cache.internals().allocator.num_blocks == 4
    assert driver.cache.internals().allocator.num_slots == len(published(driver.cache)) == 1


def test_adoption_stops_where_the_tokens_differ() -> None:
    driver = Driver()
    leases = [driver.admit(prompt(300)), driver.admit(prompt(150) + prompt(150, 5000))]
    driver.step_together([(lease, 300) for lease in leases])
    assert leases[0].table[:2] == leases[1].table[:2]
    assert not set(leases[0].table[2:]) & set(leases[1].table[2:])
    driver.flush()


def test_blocks_beyond_the_snapshot_are_shared_and_not_written() -> None:
    driver = Driver()
    driver.serve(prompt(40))
    driver.serve(prompt(300))
    lease = driver.admit(prompt(280))
    assert (lease.computed, lease.kv_start, lease.num_published) == (40, 256, 4)
    driver.prefill(lease, 50)


def test_shared_snapshot_is_read_by_many_at_once() -> None:
    driver = Driver()
    driver.serve(prompt(100))
    leases = [driver.admit([*prompt(100), token]) for token in range(5)]
    assert len({lease.src for lease in leases}) == 1
    assert len({lease.dst for lease in leases}) == 5
    assert len(driver.step_together([(lease, 101) for lease in leases])) == 5
    driver.flush()


def test_second_prompt_cuts_at_the_divergence_that_the_third_hits() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    second = driver.admit(prompt(150) + prompt(60, 5000))
    assert (second.account.hit, second.account.kv_tokens) == (0, 150)
    driver.prefill(second, 80)
    driver.release(second)
    third = driver.serve(prompt(150) + prompt(60, 6000))
    assert third.hit == 150
    assert third.snapshot_kind is SnapshotKind.BRANCH


def test_snapshot_is_left_once_at_a_position() -> None:
    driver = Driver()
    lease = driver.admit(prompt(100))
    driver.prefill(lease)
    assert not driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    again = driver.admit(prompt(100), read=False)
    driver.prefill(again, leave=False)
    assert not driver.cache.leave_snapshot(again, SnapshotKind.PROMPT_END)
    assert again.has_own_state


def test_request_id_is_leased_once() -> None:
    driver = Driver()
    driver.admit(prompt(10), "a")
    with pytest.raises(CacheInvariantError, match="a has a lease already"):
        driver.try_admit(prompt(10), "a")


def test_preempted_request_resumes_with_everything_but_its_last_token() -> None:
    driver = Driver()
    lease = driver.admit(prompt(100))
    driver.prefill(lease)
    driver.decode(lease, prompt(50, 7000))
    lease.tokens.append(1)
    driver.release(lease, SnapshotKind.PREEMPTION)
    again = driver.admit(prompt(100) + prompt(50, 7000) + [1])
    assert (again.computed, again.account.snapshot_kind) == (150, SnapshotKind.PREEMPTION)
    assert driver.step(again, 151)


def test_request_preempted_during_prefill_resumes_there() -> None:
    driver = Driver()
    lease = driver.admit(prompt(200))
    driver.step(lease, 77)
    driver.release(lease, SnapshotKind.PREEMPTION)
    assert driver.admit(prompt(200)).computed == 77


def test_whole_hit_has_no_leader() -> None:
    driver = Driver()
    driver.serve(prompt(100))
    driver.admit(prompt(100), read=False)
    assert driver.cache.find_leader(TokenBuffer(prompt(100))) is None


def test_follower_resumes_where_it_diverges_from_its_leader() -> None:
    driver = Driver()
    leader = driver.admit(prompt(500), "leader")
    lead = driver.cache.find_leader(TokenBuffer(prompt(150) + prompt(60, 5000)))
    assert lead is not None
    driver.cache.follow(lead)
    assert (lead.lease, lead.position, lead.is_pending) == (leader, 150, True)
    driver.prefill(leader, 100)
    assert not lead.is_pending
    assert driver.admit(prompt(150) + prompt(60, 5000)).computed == 150


def test_followers_with_different_divergences_get_a_cut_each() -> None:
    driver = Driver()
    leader = driver.admit(prompt(500))
    for position in (100, 128, 200, 201, 333):
        lead = driver.cache.find_leader(TokenBuffer([*prompt(position), 1]))
        assert lead is not None
        driver.cache.follow(lead)
    driver.prefill(leader)
    hits = [driver.lookup([*prompt(position), 1]).hit for position in (100, 128, 200, 201, 333)]
    assert hits == [100, 128, 200, 201, 333]


def test_leader_that_ended_is_not_waited_for() -> None:
    driver = Driver()
    leader = driver.admit(prompt(500))
    lead = driver.cache.find_leader(TokenBuffer(prompt(300)))
    assert lead is not None
    driver.release(leader)
    assert not lead.is_pending
    assert driver.cache.find_leader(TokenBuffer(prompt(300))) is None
