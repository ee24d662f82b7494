"""Files of several ranks: what all of them hold can be used."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from strandline.engine.workers.joined_entries import join_entries
from strandline.records.account import SnapshotKind
from strandline.records.path_hashes import block_hashes, root_hash
from strandline.records.persisted import PersistedBlocks, PersistedEntries, PersistedSnapshot
from strandline.records.tokens import BLOCK_KEY_BYTES, encode

DATA = encode(range(64 * 6))
HASHES = [root_hash("tree"), *block_hashes(root_hash("tree"), DATA)]


def blocks(first: int, *addresses: int, idle_s: float = 1.0) -> PersistedBlocks:
    """Blocks of one path, from the one of this number on."""
    tokens = DATA[first * BLOCK_KEY_BYTES : (first + len(addresses)) * BLOCK_KEY_BYTES]
    return PersistedBlocks("tree", HASHES[first], tokens, addresses, 0, idle_s, is_shared=False)


def snapshot(num_blocks: int, address: int, tail_address: int = 0, idle_s: float = 1.0) -> PersistedSnapshot:
    """A snapshot after whole blocks of that path; with a tail, 5 tokens further on."""
    key = encode(range(5)) if tail_address else b""
    return PersistedSnapshot(
        "tree", HASHES[num_blocks], key, address, tail_address, SnapshotKind.MARK, 0, idle_s, False
    )


def test_what_all_ranks_hold_is_kept_under_new_addresses() -> None:
    first = PersistedEntries((blocks(0, 4, 5),), (snapshot(2, 6, 7), snapshot(2, 8)))
    second = PersistedEntries((blocks(0, 1, 2, idle_s=9.0),), (snapshot(2, 3), snapshot(2, 11, 12)))
    joined, renames = join_entries([first, second])
    assert joined == PersistedEntries((blocks(0, 1, 2),), (snapshot(2, 3, 4), snapshot(2, 5)))
    assert renames == [{4: 1, 5: 2, 6: 3, 7: 4, 8: 5}, {1: 1, 2: 2, 11: 3, 12: 4, 3: 5}]


def test_what_one_rank_lacks_gets_no_address() -> None:
    first = PersistedEntries((blocks(0, 1, 2, 3), blocks(3, 4)), (snapshot(3, 5), snapshot(1, 6)))
    second = PersistedEntries((blocks(0, 1), blocks(2, 2), blocks(3, 3)), (snapshot(1, 9),))
    joined, renames = join_entries([first, second])
    assert joined == PersistedEntries((blocks(0, 1), blocks(3, 2)), (snapshot(1, 3),))
    assert renames == [{1: 1, 4: 2, 6: 3}, {1: 1, 3: 2, 9: 3}]


def test_nothing_is_kept_under_other_trees_or_keys() -> None:
    other = blocks(0, 1)._replace(tree="other")
    joined, renames = join_entries(
        [PersistedEntries((blocks(0, 1),), (snapshot(1, 2, 3),)), PersistedEntries((other,), (snapshot(1, 2),))]
    )
    assert (joined, renames) == (PersistedEntries((), ()), [{}, {}])


def test_of_files_for_one_path_one_is_used() -> None:
    first = PersistedEntries((blocks(0, 1, 2), blocks(0, 3, 4, 5)), (snapshot(2, 6), snapshot(2, 7)))
    joined, renames = join_entries([first, PersistedEntries((blocks(0, 1, 2, 3),), (snapshot(2, 4),))])
    assert joined.blocks == (blocks(0, 1, 2), blocks(0, 1, 2, 3))
    assert len(joined.snapshots) == 1
    assert renames[0] == {3: 1, 4: 2, 5: 3, 7: 4}


FILES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=6)


@given(st.lists(FILES, min_size=1, max_size=3))
def test_places_mean_the_same_path_on_all_ranks(files_of: Sequence[list[tuple[int, int]]]) -> None:
    parts, index_of = [], []
    for files in files_of:
        entries, meant = list[PersistedBlocks](), dict[int, int]()
        for first, count in files:
            indices = range(first, min(first + count, 6))
            entries.append(blocks(first, *(len(meant) + 1 + index - first for index in indices)))
            meant |= dict(zip(entries[-1].addresses, indices, strict=True))
        parts.append(PersistedEntries(tuple(entries), ()))
        index_of.append(meant)
    joined, renames = join_entries(parts)
    addresses = {address for each in joined.blocks for address in each.addresses}
    for own, names in zip(index_of, renames, strict=True):
        assert sorted(names.values()) == sorted(addresses), "each has every address once"
        meant = {new: own[old] for old, new in names.items()}
        for each in joined.blocks:
            first = HASHES.index(each.before)
            assert [meant[address] for address in each.addresses] == list(range(first, first + len(each.addresses)))
