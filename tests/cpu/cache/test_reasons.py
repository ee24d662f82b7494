"""Every token that is not hit has one reason, and each reason can be had on its own."""

from strandline.cache.eviction import Entry
from strandline.cache.inspection.published import published_snapshots
from strandline.cache.miss_reasons import MAX_OTHER_SALTS
from strandline.cache.policy.resume_rules import AtTokens
from strandline.cache.policy.worth import LeastRecentlyUsed
from strandline.cache.tree import Snapshot
from strandline.ids import RequestId
from strandline.records.account import Account, Miss, Reason, SnapshotKind
from tests.cpu.cache.driver import Driver, reasons
from tests.cpu.cache.test_lookup import prompt


class SnapshotsFirst:
    """Evicts all snapshots before any block."""

    def worth(self, entry: Entry) -> float:
        return 0 if isinstance(entry, Snapshot) else 1


class BlocksFirst:
    """Evicts all blocks before any snapshot that could live without them."""

    def worth(self, entry: Entry) -> float:
        return 1 if isinstance(entry, Snapshot) else 0


def misses(account: Account) -> tuple[Miss, ...]:
    assert account.queried == account.hit + sum(miss.num_tokens for miss in account.misses)
    return account.misses


def test_first_seen() -> None:
    driver = Driver()
    assert misses(driver.lookup(prompt(100))) == (Miss(Reason.FIRST_SEEN, 0, 100),)
    driver.serve(prompt(100))
    assert misses(driver.lookup(prompt(70, 5000))) == (Miss(Reason.FIRST_SEEN, 0, 70),)


def test_diverged_names_the_first_different_token() -> None:
    driver = Driver()
    driver.serve(prompt(150))
    assert misses(driver.lookup([*prompt(150), 1, 2, 3])) == (Miss(Reason.DIVERGED, 150, 153),)


def test_cached_kv_without_a_snapshot_is_reported_as_no_snapshot() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    assert misses(driver.lookup(prompt(150))) == (Miss(Reason.NO_SNAPSHOT, 0, 150),)
    assert misses(driver.lookup([*prompt(150), 1])) == (
        Miss(Reason.NO_SNAPSHOT, 0, 150),
        Miss(Reason.DIVERGED, 150, 151),
    )


def test_evicted_snapshot_is_remembered_when_its_run_is_split() -> None:
    driver = Driver()
    driver.serve(prompt(94))
    driver.serve(prompt(200))
    for _, _, snapshot in list(published_snapshots(driver.cache)):
        driver.cache.internals().memory.drop_snapshot(snapshot)
    driver.serve([*prompt(64), 1, 2, 3])
    assert misses(driver.lookup([*prompt(100), 1]))[0] == Miss(Reason.SNAPSHOT_EVICTED, 64, 100)


def test_snapshot_evicted() -> None:
    driver = Driver(4, 5, order=SnapshotsFirst())
    driver.serve(prompt(150))
    for first in (3000, 4000, 5000):
        driver.admit(prompt(1, first))
    assert misses(driver.lookup(prompt(150))) == (Miss(Reason.SNAPSHOT_EVICTED, 0, 150),)
    assert misses(driver.lookup(prompt(128))) == (Miss(Reason.NO_SNAPSHOT, 0, 128),)


def test_evicted_stub_is_reported_as_snapshot_evicted() -> None:
    driver = Driver(5, 5, order=SnapshotsFirst())
    driver.serve(prompt(94))
    driver.serve(prompt(94) + prompt(60, 5000))
    for first in (3000, 4000, 6000):
        driver.admit(prompt(1, first))
    account = driver.lookup([*prompt(94), 1])
    assert misses(account) == (Miss(Reason.SNAPSHOT_EVICTED, 0, 94), Miss(Reason.DIVERGED, 94, 95))


def test_evicted_snapshot_is_remembered_as_its_run_grows() -> None:
    driver = Driver(4, 5, order=SnapshotsFirst())
    driver.serve(prompt(100))
    for lease in [driver.admit(prompt(1, first)) for first in (3000, 4000, 5000)]:
        driver.release(lease)
    lease = driver.admit(prompt(200), read=False)
    driver.prefill(lease)
    assert misses(driver.lookup(prompt(110))) == (Miss(Reason.SNAPSHOT_EVICTED, 0, 110),)
    assert misses(driver.lookup(prompt(99))) == (Miss(Reason.NO_SNAPSHOT, 0, 99),)


def test_evicted() -> None:
    driver = Driver(4, 2)
    driver.serve(prompt(128))
    other = driver.admit(prompt(300, 5000))
    assert driver.cache.extend(other, 300)
    assert misses(driver.lookup(prompt(128))) == (Miss(Reason.EVICTED, 0, 128),)


def test_evicted_from_the_end() -> None:
    driver = Driver(4, 2)
    driver.serve(prompt(192))
    other = driver.admit(prompt(256, 5000))
    assert driver.cache.extend(other, 256)
    assert misses(driver.lookup(prompt(192))) == (
        Miss(Reason.NO_SNAPSHOT, 0, 64),
        Miss(Reason.EVICTED, 64, 192),
    )


def test_computing_names_the_request() -> None:
    driver = Driver()
    driver.admit(prompt(200), "leader")
    assert misses(driver.lookup(prompt(150))) == (Miss(Reason.COMPUTING, 0, 150, RequestId("leader")),)
    assert misses(driver.lookup([*prompt(150), 1])) == (
        Miss(Reason.COMPUTING, 0, 150, RequestId("leader")),
        Miss(Reason.DIVERGED, 150, 151),
    )


def test_computing_names_the_request_with_the_longest_shared_prefix() -> None:
    driver = Driver()
    driver.admit(prompt(90), "short")
    driver.admit(prompt(3000), "long")
    driver.admit(prompt(90) + prompt(90, 5000), "other")
    account = driver.lookup([*prompt(2777), 1])
    assert misses(account)[0] == Miss(Reason.COMPUTING, 0, 2777, RequestId("long"))


def test_other_salt() -> None:
    driver = Driver()
    driver.serve(prompt(150), salt="alice")
    assert misses(driver.lookup(prompt(150), "bob")) == (Miss(Reason.OTHER_SALT, 0, 150),)
    assert misses(driver.lookup(prompt(160), "bob")) == (
        Miss(Reason.OTHER_SALT, 0, 150),
        Miss(Reason.DIVERGED, 150, 160),
    )


def test_not_asked() -> None:
    driver = Driver()
    driver.serve(prompt(150))
    assert misses(driver.admit(prompt(150), read=False).account) == (Miss(Reason.NOT_ASKED, 0, 150),)


def test_lone_request_without_room_for_its_snapshot_starts_over() -> None:
    driver = Driver(3, 1)
    driver.serve(prompt(40))
    assert driver.lookup(prompt(40)).hit == 40
    lease = driver.admit(prompt(40))
    assert misses(lease.account) == (Miss(Reason.NO_ROOM, 0, 40),)
    driver.prefill(lease)


def test_request_waits_for_room_while_others_run() -> None:
    driver = Driver(5, 1)
    driver.serve(prompt(40))
    other = driver.admit(prompt(10, 5000))
    driver.prefill(other, leave=False)
    assert driver.try_admit(prompt(40)) is None
    driver.release(other)
    assert driver.admit(prompt(40)).account.hit == 40


def test_counters_sum_the_reasons_of_requests() -> None:
    driver = Driver(4, 5, order=BlocksFirst())
    driver.serve(prompt(150))
    account = driver.serve(prompt(100) + prompt(30, 4000))
    assert reasons(account) == {Reason.NO_SNAPSHOT: 100, Reason.DIVERGED: 30}
    counted = {reason: tokens for reason, tokens in driver.cache.stats().missed_tokens.items() if tokens}
    assert counted == {Reason.FIRST_SEEN: 150, Reason.NO_SNAPSHOT: 100, Reason.DIVERGED: 30}
    assert driver.cache.stats().snapshots_taken[SnapshotKind.BRANCH] == 1


def test_remembered_evictions_are_bounded() -> None:
    driver = Driver(3, 2)
    for index in range(500):
        driver.serve(prompt(60 + index % 20, 1000 * index))
    root = driver.cache.internals().index.roots[""]
    assert len(root.evicted_children) <= 64
    assert len(root.evicted_snapshots) <= 64


def test_roots_of_idle_salts_are_dropped() -> None:
    driver = Driver(3, 2)
    for index in range(400):
        driver.serve(prompt(5), salt=f"salt-{index}")
    assert len(driver.cache.internals().index.roots) <= 300


def test_accounts_for_callers_reveal_nothing_of_other_salts() -> None:
    driver = Driver()
    driver.serve(prompt(150), salt="alice")
    driver.serve(prompt(30) + prompt(100, 5000), salt="bob")
    for num_tokens in (140, 150, 160):
        seen = driver.lookup(prompt(num_tokens), "carol").for_callers()
        assert misses(seen) == (Miss(Reason.FIRST_SEEN, 0, num_tokens),)
        seen = driver.lookup(prompt(num_tokens), "bob").for_callers()
        assert misses(seen)[-1] == Miss(Reason.DIVERGED, 30, num_tokens)
    own = driver.lookup([*prompt(150), 1], "alice")
    assert own.for_callers() is own


def test_number_of_other_salts_searched_is_bounded() -> None:
    driver = Driver(200)
    driver.serve(prompt(70), salt="oldest")
    for index in range(MAX_OTHER_SALTS):
        assert misses(driver.lookup(prompt(70), "new")) == (Miss(Reason.OTHER_SALT, 0, 70),)
        driver.serve(prompt(70, 5000 + 1000 * index), salt=str(index))
    assert misses(driver.lookup(prompt(70), "new")) == (Miss(Reason.FIRST_SEEN, 0, 70),)
    assert misses(driver.lookup(prompt(70), "oldest")) == ()


def test_told_tokens_add_up_and_hide_other_salts() -> None:
    driver = Driver()
    for salt, tokens in (("alice", prompt(150)), ("bob", [*prompt(100), *prompt(60, 5000)]), ("bob", prompt(120))):
        driver.serve(tokens, salt=salt)
    counters = driver.cache.stats()
    assert counters.missed_tokens[Reason.OTHER_SALT] > 0
    assert counters.told_tokens[Reason.OTHER_SALT] == 0
    assert counters.told_tokens[Reason.FIRST_SEEN] == 150 + 160
    for counted in (counters.missed_tokens, counters.told_tokens):
        assert counters.hit_tokens + sum(counted.values()) == counters.queried_tokens


def test_evicted_tokens_are_told_beside_a_similar_block() -> None:
    driver = Driver(7, 1, rule=AtTokens(), order=LeastRecentlyUsed())  # six blocks
    driver.serve(prompt(100) + prompt(92, 5000))
    driver.serve(prompt(100) + prompt(92, 6000))
    driver.serve(prompt(192, 9000))
    account = driver.lookup(prompt(100) + prompt(92, 5000))
    assert misses(account)[0] == Miss(Reason.EVICTED, 100, 192)
