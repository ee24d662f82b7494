"""What a lookup finds: the deepest snapshot, to the token."""

import pytest

from strandline.cache.inspection.published import published_snapshots
from strandline.ids import NULL_SLOT
from strandline.records.account import Reason, SnapshotKind
from strandline.records.tokens import TokenBuffer
from tests.cpu.cache.driver import Driver, only_miss, reasons
from tests.cpu.cache.history import fingerprint

LENGTHS = [1, 63, 64, 65, 127, 128, 129]


def prompt(num_tokens: int, first: int = 1000) -> list[int]:
    """Return tokens that no other prompt with another ``first`` shares."""
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_identical_prompt_is_a_whole_hit_at_any_length(num_tokens: int) -> None:
    driver = Driver()
    driver.serve(prompt(num_tokens))
    account = driver.lookup(prompt(num_tokens))
    assert (account.queried, account.hit, account.kv_tokens) == (num_tokens,) * 3
    assert account.misses == ()


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("num_more", [1, 63, 64, 65])
def test_longer_prompt_hits_all_of_the_shorter_one(num_tokens: int, num_more: int) -> None:
    driver = Driver()
    driver.serve(prompt(num_tokens))
    account = driver.serve(prompt(num_tokens) + prompt(num_more, 5000))
    assert account.hit == num_tokens
    assert reasons(account) == {Reason.DIVERGED: num_more}


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prompt_one_token_shorter_hits_nothing_and_says_why(num_tokens: int) -> None:
    driver = Driver()
    driver.serve(prompt(num_tokens + 1))
    account = driver.lookup(prompt(num_tokens))
    assert account.hit == 0
    assert only_miss(account).reason is Reason.NO_SNAPSHOT
    assert account.kv_tokens == num_tokens


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 100])
def test_partition_into_steps_does_not_change_hits(chunk: int) -> None:
    driver = Driver()
    driver.serve(prompt(150), chunk=chunk)
    assert driver.lookup(prompt(200)).hit == 150


def test_match_stops_at_deepest_snapshot() -> None:
    driver = Driver()
    lease = driver.admit(prompt(200))
    for end in (10, 64, 70, 130, 199):
        driver.step(lease, end)
        driver.cache.leave_snapshot(lease, SnapshotKind.PROMPT_END)
    driver.prefill(lease, leave=False)
    found = [driver.lookup(prompt(length)).hit for length in (9, 10, 63, 64, 69, 70, 129, 130, 198, 199, 200)]
    assert found == [0, 10, 10, 64, 64, 70, 70, 130, 130, 199, 199]


def test_empty_prompt_hits_nothing_and_misses_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(70))
    account = driver.lookup([])
    assert (account.queried, account.hit, account.misses) == (0, 0, ())


def test_identical_prompt_is_a_whole_hit_while_the_first_decodes() -> None:
    driver = Driver()
    first = driver.admit(prompt(100))
    driver.prefill(first)
    driver.decode(first, [7, 8, 9])
    second = driver.admit(prompt(100))
    assert second.computed == second.account.hit == 100
    assert second.account.snapshot_kind is SnapshotKind.PROMPT_END
    driver.decode(first, [10] * 40)
    driver.decode(second, [11] * 40)
    driver.flush()


def test_next_turn_hits_the_generated_tokens() -> None:
    driver = Driver()
    driver.serve(prompt(90), generated=prompt(45, 9000))
    account = driver.lookup(prompt(90) + prompt(45, 9000) + [5])
    assert account.hit == 135
    assert account.snapshot_kind is SnapshotKind.GENERATION_END


def test_different_salt_never_hits() -> None:
    driver = Driver()
    driver.serve(prompt(200), salt="alice")
    assert driver.lookup(prompt(200), salt="alice").hit == 200
    for salt in ("", "bob"):
        account = driver.serve(prompt(200), salt=salt)
        assert (account.hit, account.kv_tokens) == (0, 0)
    assert {salt for salt, _, _ in published_snapshots(driver.cache)} == {"alice", "", "bob"}


def test_lookup_changes_nothing() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    lease = driver.admit(prompt(130) + prompt(50, 7000))
    driver.prefill(lease, 33)
    before = fingerprint(driver)
    for tokens in (prompt(200), prompt(64), [*prompt(131), 1], prompt(20, 3)):
        driver.lookup(tokens)
        driver.lookup(tokens, salt="new")
    assert fingerprint(driver) == before


def test_stub_is_found_although_a_sibling_matches_deeper() -> None:
    """Two blocks share 30 tokens, with a snapshot there; a third prompt shares 50 with one that has none."""
    driver = Driver()
    shared = prompt(64) + prompt(30, 2000)
    driver.serve(shared)
    driver.serve(shared + prompt(100, 3000))
    assert driver.lookup(shared + prompt(20, 3000) + [1]).hit == 94
    assert driver.lookup(shared + prompt(20, 3000) + [1]).kv_tokens == 114
    driver.serve(shared + prompt(5, 3000) + prompt(100, 4000))
    for tail in ([1], prompt(40, 3000), prompt(5, 3000) + prompt(20, 4000)):
        assert driver.lookup(shared + tail).hit >= 94


def test_disabled_cache_keeps_and_finds_nothing() -> None:
    driver = Driver(enabled=False)
    for _ in range(2):
        account = driver.serve(prompt(130), generated=[1, 2, 3])
        assert account.hit == 0
        assert only_miss(account).reason is Reason.NOT_ASKED
    assert list(published_snapshots(driver.cache)) == []
    assert driver.cache.internals().allocator.num_blocks == driver.cache.internals().allocator.num_slots == 0


def test_request_that_does_not_read_still_leaves_snapshots() -> None:
    driver = Driver()
    driver.serve(prompt(100))
    lease = driver.admit([*prompt(100), 1], read=False)
    assert (lease.computed, lease.src) == (0, NULL_SLOT)
    driver.prefill(lease)
    driver.release(lease)
    assert driver.lookup([*prompt(100), 1]).hit == 101


def test_counters_add_up() -> None:
    driver = Driver()
    accounts = [driver.serve(prompt(n), salt=salt) for n in (100, 150, 150, 70) for salt in ("", "x")]
    counters = driver.cache.stats()
    assert counters.queries == len(accounts)
    assert counters.hit_tokens == sum(account.hit for account in accounts)
    assert counters.queried_tokens == counters.hit_tokens + sum(counters.missed_tokens.values())
    assert sum(counters.hits_by_kind.values()) == sum(account.hit > 0 for account in accounts)


def test_repeated_lookup_walks_the_index_once_until_something_changes() -> None:
    driver = Driver()
    driver.serve(prompt(300))
    index, tokens = driver.cache.internals().index, TokenBuffer(prompt(299))
    root = index.roots[""]
    found = index.find(root, tokens.data)
    assert (found.end.kv_tokens, found.snapshot) == (299, None)
    assert index.find(root, tokens.data) is found
    tokens.append(1299)
    found = index.find(root, tokens.data)
    snapshot = found.snapshot
    assert snapshot is not None
    assert index.find(root, tokens.data) is found
    driver.cache.internals().memory.drop_snapshot(snapshot)
    assert index.find(root, tokens.data).snapshot is None
