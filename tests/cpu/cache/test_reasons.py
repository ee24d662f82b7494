"""Every token that is not hit has one reason, and each reason can be had on its own."""

from strandline.cache import Account, Miss, Reason, SnapshotKind
from strandline.cache.eviction import Entry
from strandline.cache.explain import MAX_OTHER_SALTS
from strandline.cache.tree import Snapshot
from strandline.ids import RequestId
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


def test_diverged_says_at_which_token() -> None:
    driver = Driver()
    driver.serve(prompt(150))
    assert misses(driver.lookup([*prompt(150), 1, 2, 3])) == (Miss(Reason.DIVERGED, 150, 153),)


def test_keys_and_values_deeper_than_any_snapshot_are_no_snapshot() -> None:
    driver = Driver()
    driver.serve(prompt(200))
    assert misses(driver.lookup(prompt(150))) == (Miss(Reason.NO_SNAPSHOT, 0, 150),)
    assert misses(driver.lookup([*prompt(150), 1])) == (
        Miss(Reason.NO_SNAPSHOT, 0, 150),
        Miss(Reason.DIVERGED, 150, 151),
    )


def test_snapshot_evicted() -> None:
    driver = Driver(4, 5, order=SnapshotsFirst())
    driver.serve(prompt(150))
    for first in (3000, 4000, 5000):
        driver.admit(prompt(1, first))
    assert misses(driver.lookup(prompt(150))) == (Miss(Reason.SNAPSHOT_EVICTED, 0, 150),)
    assert misses(driver.lookup(prompt(128))) == (Miss(Reason.NO_SNAPSHOT, 0, 128),)


def test_snapshot_evicted_where_siblings_part() -> None:
    driver = Driver(5, 5, order=SnapshotsFirst())
    driver.serve(prompt(94))
    driver.serve(prompt(94) + prompt(60, 5000))
    for first in (3000, 4000, 6000):
        driver.admit(prompt(1, first))
    account = driver.lookup([*prompt(94), 1])
    assert misses(account) == (Miss(Reason.SNAPSHOT_EVICTED, 0, 94), Miss(Reason.DIVERGED, 94, 95))


def test_evicted_snapshot_is_remembered_when_its_run_grows() -> None:
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


def test_computing_names_the_request_that_goes_furthest() -> None:
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


def test_no_room_when_a_lone_request_cannot_hold_its_snapshot_beside_its_state() -> None:
    driver = Driver(3, 1)
    driver.serve(prompt(40))
    assert driver.lookup(prompt(40)).hit == 40
    lease = driver.admit(prompt(40))
    assert misses(lease.account) == (Miss(Reason.NO_ROOM, 0, 40),)
    driver.prefill(lease)


def test_with_others_running_it_waits_for_room_instead() -> None:
    driver = Driver(5, 1)
    driver.serve(prompt(40))
    other = driver.admit(prompt(10, 5000))
    driver.prefill(other, leave=False)
    assert driver.try_admit(prompt(40)) is None
    driver.release(other)
    assert driver.admit(prompt(40)).account.hit == 40


def test_reasons_of_one_request_add_up_in_the_counters() -> None:
    driver = Driver(4, 5, order=BlocksFirst())
    driver.serve(prompt(150))
    account = driver.serve(prompt(100) + prompt(30, 4000))
    assert reasons(account) == {Reason.NO_SNAPSHOT: 100, Reason.DIVERGED: 30}
    counted = {reason: tokens for reason, tokens in driver.cache.stats().missed_tokens.items() if tokens}
    assert counted == {Reason.FIRST_SEEN: 150, Reason.NO_SNAPSHOT: 100, Reason.DIVERGED: 30}
    assert driver.cache.stats().snapshots_taken[SnapshotKind.BRANCH] == 1


def test_memory_of_what_was_evicted_is_bounded() -> None:
    driver = Driver(3, 2)
    for index in range(500):
        driver.serve(prompt(60 + index % 20, 1000 * index))
    root = driver.cache.internals().index.roots[""]
    assert len(root.evicted) <= 64
    assert len(root.lost) <= 64


def test_roots_of_idle_salts_are_forgotten() -> None:
    driver = Driver(3, 2)
    for index in range(400):
        driver.serve(prompt(5), salt=f"salt-{index}")
    assert len(driver.cache.internals().index.roots) <= 300


def test_callers_are_told_nothing_of_other_salts_not_even_by_where_a_range_ends() -> None:
    driver = Driver()
    driver.serve(prompt(150), salt="alice")
    driver.serve(prompt(30) + prompt(100, 5000), salt="bob")
    for num_tokens in (140, 150, 160):
        told = driver.lookup(prompt(num_tokens), "carol").for_callers()
        assert misses(told) == (Miss(Reason.FIRST_SEEN, 0, num_tokens),)
        told = driver.lookup(prompt(num_tokens), "bob").for_callers()
        assert misses(told)[-1] == Miss(Reason.DIVERGED, 30, num_tokens)
    own = driver.lookup([*prompt(150), 1], "alice")
    assert own.for_callers() is own


def test_what_is_cached_under_other_salts_is_looked_for_under_so_many_only() -> None:
    driver = Driver(200)
    driver.serve(prompt(70), salt="oldest")
    for index in range(MAX_OTHER_SALTS):
        assert misses(driver.lookup(prompt(70), "new")) == (Miss(Reason.OTHER_SALT, 0, 70),)
        driver.serve(prompt(70, 5000 + 1000 * index), salt=str(index))
    assert misses(driver.lookup(prompt(70), "new")) == (Miss(Reason.FIRST_SEEN, 0, 70),)
    assert misses(driver.lookup(prompt(70), "oldest")) == ()


def test_counters_of_what_callers_are_told_add_up_and_tell_no_more_than_accounts() -> None:
    driver = Driver()
    for salt, tokens in (("alice", prompt(150)), ("bob", [*prompt(100), *prompt(60, 5000)]), ("bob", prompt(120))):
        driver.serve(tokens, salt=salt)
    counters = driver.cache.stats()
    assert counters.missed_tokens[Reason.OTHER_SALT] > 0
    assert counters.told_tokens[Reason.OTHER_SALT] == 0
    assert counters.told_tokens[Reason.FIRST_SEEN] == 150 + 160
    for counted in (counters.missed_tokens, counters.told_tokens):
        assert counters.hit_tokens + sum(counted.values()) == counters.queried_tokens
