"""The eviction queue gives what is worth least of what may go, however offers and evictions are interleaved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.eviction import MAX_UNRANKED, Entry, EvictionQueue
from strandline.cache.tree import Snapshot
from strandline.cache.use import NO_INTERARRIVAL, Use
from strandline.ids import SlotId
from strandline.records.account import SnapshotKind

Step = tuple[str, int, int]
STEPS = st.lists(st.tuples(st.sampled_from(["offer", "hold", "pop"]), st.integers(0, 5), st.integers(0, 9)))


def new_snapshot(slot: SlotId) -> Snapshot:
    return Snapshot(slot, 64, SnapshotKind.LADDER, Use(0, NO_INTERARRIVAL), num_readers=0, is_shared=False)


class Shelf:
    """Entries whose worth and whether they are held are set by hand."""

    def __init__(self, num_entries: int) -> None:
        self.entries = [new_snapshot(SlotId(number)) for number in range(num_entries)]
        self.worths = dict.fromkeys(self.entries, 0)
        self.offered = set[Snapshot]()
        self.held = set[Snapshot]()
        self.num_appraisals = 0
        self.queue = EvictionQueue(self, lambda entry: entry not in self.held)

    def worth(self, entry: Entry) -> float:
        assert isinstance(entry, Snapshot)
        self.num_appraisals += 1
        return self.worths[entry]

    def offer(self, entry: Snapshot, worth: int) -> None:
        self.worths[entry] = worth
        self.held.discard(entry)
        self.offered.add(entry)
        self.queue.push(entry)


@given(STEPS)
def test_evicted_entry_is_the_least_worth_of_the_evictable(steps: list[Step]) -> None:
    shelf = Shelf(6)
    for step, number, worth in steps:
        entry = shelf.entries[number]
        match step:
            case "offer":
                shelf.offer(entry, worth)
            case "hold":
                shelf.held.add(entry)
            case _:
                candidates = shelf.offered - shelf.held
                gone = shelf.queue.pop()
                assert (gone is None) == (not candidates)
                if isinstance(gone, Snapshot):
                    assert gone in candidates
                    assert shelf.worths[gone] == min(shelf.worths[candidate] for candidate in candidates)
                    shelf.offered.remove(gone)


class Decay(Shelf):
    """A shelf whose entries lose worth as time goes by, each at its own times."""

    def __init__(self, num_entries: int) -> None:
        self.now = 0
        super().__init__(num_entries)

    def worth(self, entry: Entry) -> float:
        return self.appraise(entry)[0]

    def appraise(self, entry: Entry) -> tuple[float, int | None]:
        assert isinstance(entry, Snapshot)
        every = 1 + entry.slot % 7
        age = self.now - entry.use.at
        return super().worth(entry) - age // every, entry.use.at + (age // every + 1) * every

    def offer(self, entry: Snapshot, worth: int) -> None:
        entry.use = Use(self.now, NO_INTERARRIVAL)
        super().offer(entry, worth)


@pytest.mark.parametrize("seed", range(4))
def test_entry_is_evicted_by_its_present_worth(seed: int) -> None:
    """However much time passes between evictions, and when the queue has dropped its stale entries."""
    choose = random.Random(seed)
    shelf = Decay(200)
    num_gone = 0
    for _ in range(10_000):
        entry = choose.choice(shelf.entries)
        match choose.choices(["offer", "hold", "pop", "wait"], [12, 1, 2, 2])[0]:
            case "offer":
                shelf.offer(entry, choose.randrange(1000))
            case "hold":
                shelf.held.add(entry)
            case "wait":
                shelf.now += choose.choice([1, 1, 1, 30, 300])
            case _:
                worths = {candidate: shelf.worth(candidate) for candidate in shelf.offered - shelf.held}
                gone = shelf.queue.pop()
                assert (gone is None) == (not worths)
                if isinstance(gone, Snapshot):
                    assert worths[gone] == min(worths.values())
                    shelf.offered.remove(gone)
                    num_gone += 1
    assert num_gone > 500


def test_repeated_offers_are_ranked_once_at_the_next_eviction() -> None:
    shelf = Shelf(2)
    for worth in range(20):
        shelf.offer(shelf.entries[0], worth)
        shelf.offer(shelf.entries[1], 5)
    assert shelf.num_appraisals == 0
    assert shelf.queue.pop() is shelf.entries[1]
    assert shelf.num_appraisals == 3


def test_deferred_offers_are_bounded() -> None:
    shelf = Shelf(3 * MAX_UNRANKED)
    for entry in shelf.entries:
        before = shelf.num_appraisals
        shelf.offer(entry, 1)
        assert shelf.num_appraisals - before <= MAX_UNRANKED
    before = shelf.num_appraisals
    shelf.queue.pop()
    assert shelf.num_appraisals - before <= MAX_UNRANKED + 1
