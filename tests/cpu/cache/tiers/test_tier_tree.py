"""The tree of what rests: walks find what a walk block by block finds, and follow known paths in strides."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.cache.tiers import tier_tree
from strandline.cache.tiers.tier_tree import TierBlock, TierSnapshot, TierTree, descend, find_block, nodes_from
from strandline.records.tokens import BLOCK_KEY_BYTES, encode

Path = tuple[int, ...]


@pytest.fixture(autouse=True, scope="module")
def _short_strides() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_tree, "STRIDE_BLOCKS", 3)
        yield


def encoded(path: Path) -> bytes:
    """Return whole blocks of tokens, one for each number."""
    return encode(token for number in path for token in [number] * 64)


def numbers_before(node: TierBlock) -> Path:
    return tuple(child.key[3] for child in list(node.ancestry())[::-1])


def prune(tree: TierTree, node: TierBlock, removed: int) -> None:
    """Remove the last blocks of a path, as many as nothing else needs."""
    path = list(node.ancestry())
    if removed < len(path):
        path[removed].snapshots = {b"": TierSnapshot(0, b"")}
    tree.prune(node)
    if removed < len(path):
        path[removed].snapshots = {}


PATHS = st.lists(st.integers(0, 1), max_size=14).map(tuple)


@given(
    events=st.lists(st.tuples(PATHS, st.integers(0, 14)), max_size=12),
    asked=st.lists(PATHS, min_size=1, max_size=4),
)
def test_strides_lead_where_single_blocks_lead(events: list[tuple[Path, int]], asked: list[Path]) -> None:
    tree = TierTree(1, None)
    root = tree.root("")
    known: set[Path] = {()}
    for path, removed in events:
        node = tree.add_block("", encoded(path), len(path))
        assert numbers_before(node) == path
        prune(tree, node, removed)
        known = {()} | {numbers_before(each) for each in nodes_below(root)}
        for other in asked:
            node, depth = descend(root, bytearray(encoded(other)), len(other))
            deepest = max(end for end in range(len(other) + 1) if other[:end] in known)
            assert (numbers_before(node), depth) == (other[:deepest], deepest)
            found = find_block(root, encoded(other), len(other))
            assert (found is not None) == (other in known)


def nodes_below(root: TierBlock) -> Iterator[TierBlock]:
    for child in root.children.values():
        yield child
        yield from nodes_below(child)


def test_removed_blocks_keep_no_others() -> None:
    tree, path = TierTree(1, None), tuple(range(12))
    root = tree.root("")
    end = tree.add_block("", encoded(path), len(path))
    assert find_block(root, encoded(path), len(path)) is end
    nodes = nodes_from(end, len(path))
    assert [node.stride is not None for node in nodes[2::3]] == [True, True, True, False]
    prune(tree, end, len(path))
    assert not any(node.stride for node in nodes)
    assert descend(root, encoded(path), len(path)) == (root, 0)


class Untouchable(dict[bytes, TierBlock]):
    """Children that no walk asks for."""

    def get(self, *_: object) -> TierBlock:
        raise AssertionError("a known path was walked block by block")


def test_known_paths_are_followed_in_strides() -> None:
    tree, path = TierTree(1, None), tuple(range(31))
    root = tree.root("")
    end = tree.add_block("", encoded(path), len(path))
    assert find_block(root, encoded(path), len(path)) is end
    for node in nodes_from(end, 30)[:-1]:
        node.children = Untouchable(node.children)
    root.children = Untouchable(root.children)
    assert descend(root, encoded(path)[: 30 * BLOCK_KEY_BYTES], 30) == (end.parent, 30)
