"""Lists the snapshots of a cache."""

from collections.abc import Iterator

from strandline.cache.core import PrefixCache
from strandline.cache.tree import Run, Snapshot
from strandline.records.tokens import BLOCK_KEY_BYTES


def published_snapshots(cache: PrefixCache) -> Iterator[tuple[str, bytes, Snapshot]]:
    """Yield salt, tokens (encoded) and snapshot of everything published."""
    for salt, root in cache.internals().index.roots.items():
        for tokens, snapshot in _snapshots_below(root):
            yield salt, tokens, snapshot


def _snapshots_below(root: Run) -> Iterator[tuple[bytes, Snapshot]]:
    """Yield every snapshot of a tree with its tokens (encoded)."""
    waiting = [(root, b"")]
    while waiting:
        run, prefix = waiting.pop()
        tokens = prefix + bytes(run.tokens)
        for (num_blocks, tail), snapshot in run.snapshots.items():
            yield tokens[: num_blocks * BLOCK_KEY_BYTES] + tail, snapshot
        waiting.extend((child, tokens) for child in run.children.values())
