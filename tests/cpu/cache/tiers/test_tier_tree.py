"""What tiers have of the tree: runs of blocks answer as single blocks would."""

import sys
from array import array
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strandline.cache.tiers.neighbours import end_above, next_below
from strandline.cache.tiers.path_blocks import PathBlocks
from strandline.cache.tiers.paths import pieces
from strandline.cache.tiers.stored import Copy, TierSnapshot
from strandline.cache.tiers.tier_tree import TierTree
from strandline.cache.traversal import all_runs_below, demoted_after
from strandline.cache.use import Use
from strandline.cache.walk import PathEnd, descend_below, walk
from strandline.ids import BLOCK_TOKENS
from strandline.records.account import SnapshotKind
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES, encode
from tests.cpu.cache.driver import Driver

Path = tuple[int, ...]


def encoded(path: Path) -> bytes:
    """Return whole blocks of tokens, one for each number."""
    return encode(token for number in path for token in [number] * BLOCK_TOKENS)


def numbers(data: bytes | bytearray) -> Path:
    return tuple(data[3::BLOCK_KEY_BYTES])


def new_tree(num_tiers: int) -> TierTree:
    parts = Driver().cache.internals()
    return TierTree(num_tiers, None, parts.index, parts.memory)


def entered(tree: TierTree, path: Path, tier: int, tail: bytes = b"") -> Copy:
    """Return a copy for a tier of the snapshot at the end of a path and a tail, which is in the tree now."""
    home = tree.grow("", encoded(path), len(path))
    snapshot = tree.attach(TierSnapshot(home, (len(path), tail)))
    copy = Copy(snapshot, SnapshotKind.BRANCH, Use(0, 0), snapshot.position)
    tree.columns[tier].enter(copy)
    return copy


def beginnings(paths: set[Path]) -> set[Path]:
    return {()} | {path[:end] for path in paths for end in range(len(path) + 1)}


PATHS = st.lists(st.integers(0, 1), max_size=9).map(tuple)


@given(
    events=st.lists(st.tuples(PATHS, st.integers(0, 1), st.booleans()), max_size=16),
    asked=st.lists(PATHS, min_size=1, max_size=4),
)
def test_runs_hold_what_single_blocks_would(events: list[tuple[Path, int, bool]], asked: list[Path]) -> None:
    tree = new_tree(2)
    root = tree.root("")
    held: tuple[dict[Path, Copy], ...] = ({}, {})
    for path, tier, is_leaving in events:
        column = tree.columns[tier]
        if not is_leaving and path not in held[tier]:
            held[tier][path] = entered(tree, path, tier)
        elif is_leaving and path in held[tier]:
            copy = held[tier].pop(path)
            alone = column.blocks_for(copy)
            num_alone = len(beginnings({path}) - beginnings(set(held[tier])))
            assert sum(end - start for _, start, end in alone) == num_alone
            column.leave(copy, alone)
            tree.detach(copy.snapshot)
        known = beginnings({*held[0], *held[1]})
        assert sum(run.end_block - run.start_block for run in all_runs_below(root)) == len(known) - 1
        for other in asked:
            end = walk(root, bytearray(encoded(other))).last
            deepest = max(end for end in range(len(other) + 1) if other[:end] in known)
            assert end.depth == deepest
            tokens = b"".join([blocks.run.tokens for blocks in pieces(end)])
            assert numbers(tokens)[: end.depth] == other[: end.depth]
            for column, paths in zip(tree.columns, map(set, held), strict=True):
                found = beginnings(paths)
                last = column.last_on_path(end)
                assert last.depth == max(size for size in range(deepest + 1) if other[:size] in found)
                continued = {path for path in found if path and path[:-1] == other[: last.depth]}
                assert column.num_children(last) == min(len(continued), 2)
                above = sorted((path for path in paths if other[: len(path)] == path), key=len, reverse=True)
                found_above = column.copies_on(end, encoded(other))
                assert [copy.snapshot.num_blocks for copy in found_above] == list(map(len, above))


def test_the_nearest_snapshot_above_is_on_the_same_path() -> None:
    tree = new_tree(2)
    column, other = tree.columns
    first, second = (entered(tree, path, 0) for path in [(1,), (1, 2)])
    inside = entered(tree, (1, 2), 0, encoded((3,))[: 5 * TOKEN_BYTES])
    deeper = entered(tree, (1, 2), 0, encoded((3,))[: 9 * TOKEN_BYTES])
    below, beside = (entered(tree, path, 0).snapshot for path in [(1, 2, 3), (1, 2, 9, 9)])
    assert (column.above(first.snapshot), column.above(second.snapshot)) == (None, first)
    assert (column.above(inside.snapshot), column.above(deeper.snapshot)) == (second, inside)
    assert (column.above(below), column.above(beside), other.above(below)) == (deeper, second, None)


@given(
    events=st.lists(st.tuples(PATHS, st.lists(st.integers(0, 1), max_size=4), st.integers(0, 2)), min_size=1),
    index=st.integers(0),
)
def test_neighbours_are_those_that_trying_all_finds(events: list[tuple[Path, list[int], int]], index: int) -> None:
    tree = new_tree(2)
    column, held = tree.columns[0], dict[bytes, Copy]()
    for path, tail, tier in events:
        tokens = encoded(path) + encode(tail)
        if tokens not in held:
            copy = entered(tree, path, min(tier, 1), encode(tail))
            held |= {tokens: copy} if copy.column is column else {}
    assume(held)
    data = list(held)[index % len(held)]
    removed = held.pop(data)
    left = column.leave(removed, column.blocks_for(removed))
    size = left.depth * BLOCK_KEY_BYTES
    is_continued = any(len(other) >= size + BLOCK_KEY_BYTES for other in held if other.startswith(data[:size]))
    above = max((other for other in held if len(other) >= size and data.startswith(other)), key=len, default=None)
    end = end_above(column, left, removed.snapshot)
    assert end is (None if is_continued or above is None else held[above])


def siblings(num_siblings: int) -> tuple[TierTree, Copy]:
    """Return a tree with snapshots in one block that begin alike, most before the last, which is returned."""
    tree = new_tree(1)
    entered(tree, (1,), 0)
    for number in range(num_siblings):
        entered(tree, (1, 2), 0, encode([7] * 5 + [number]))
    return tree, entered(tree, (1, 2), 0, encode([7] * 5 + [num_siblings, 1]))


def num_calls(act: Callable[[], object]) -> int:
    """Count the calls of functions, in Python and in C, that an action makes."""
    events = list[str]()
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        act()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def path_end(tree: TierTree) -> PathEnd:
    return walk(tree.root(""), bytearray(encoded((1, 2)))).last


@pytest.mark.parametrize(
    "find",
    [
        lambda tree, last: list(next_below(tree.columns[0], last.snapshot)),
        lambda tree, last: end_above(tree.columns[0], PathEnd(last.snapshot.home, 2), last.snapshot),
        lambda tree, last: tree.columns[0].above(last.snapshot),
        lambda tree, _: tree.columns[0].above(entered(tree, (1, 2, 3), 0).snapshot),
        lambda tree, last: list(tree.columns[0].copies_on(path_end(tree), encoded((1, 2, 9)))),
    ],
    ids=["next below", "end above", "above", "above from a deeper block", "on a path"],
)
def test_neighbours_are_found_without_trying_all_siblings(find: Callable[[TierTree, Copy], object]) -> None:
    few, many = (num_calls(partial(find, *siblings(num_siblings))) for num_siblings in (20, 1000))
    assert 0 < many <= few + 20


def test_addresses_stay_with_their_blocks_when_runs_are_split() -> None:
    tree = new_tree(1)
    (column,) = tree.columns
    copy = entered(tree, (1, 2, 3, 4, 5), 0)
    (run,) = demoted_after(tree.root("")).values()
    column.addresses_in(run)[:] = array("q", [11, 12, 13, 14, 15])
    entered(tree, (1, 2, 9), 0)
    located = PathBlocks(copy.snapshot, [4, 0, 1, 3, 7]).locate()
    found = {index: column.addresses_in(run)[own] for index, (run, own) in located.items()}
    assert [*found.items()] == [(0, 11), (1, 12), (3, 14), (4, 15)]
    assert copy.snapshot.path() == encoded((1, 2, 3, 4, 5))
    run, _ = descend_below(tree.root(""), 0, encoded((1, 2, 3, 4, 5)), 5)
    assert column.addresses(PathEnd(run, 4), 1).tolist() == [12, 13, 14]
