"""The most that a cache could hit: the longest common prefix with anything seen before. Forgets nothing."""

from array import array

from strandline.cache.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES
from strandline.cache.tree import Run, add_child, split, walk
from strandline.ids import NULL_BLOCK

PADDING = b"\xff" * BLOCK_KEY_BYTES
"""Fills a last block. No prompt holds this token, so that what is matched of the block is exact."""


class SeenPrefixes:
    """All sequences seen so far, by salt."""

    def __init__(self) -> None:
        self._roots: dict[str, Run] = {}

    def longest(self, data: bytearray, salt: str = "") -> int:
        """Return how many leading tokens some earlier sequence shares."""
        root = self._roots.get(salt)
        if root is None:
            return 0
        padded = data + PADDING[: -len(data) % BLOCK_KEY_BYTES]
        return min(walk(root, padded).kv_tokens, len(data) // TOKEN_BYTES)

    def add(self, data: bytearray, salt: str = "") -> None:
        """Remember a sequence."""
        root = self._roots.setdefault(salt, Run(None, 0, b"", array("i")))
        padded = data + PADDING[: -len(data) % BLOCK_KEY_BYTES]
        end = walk(root, padded)
        if end.num_blocks * BLOCK_KEY_BYTES == len(padded):
            return
        run = end.run
        if end.num_blocks < run.end_block:
            run = split(run, end.num_blocks)
        rest = bytes(padded[end.num_blocks * BLOCK_KEY_BYTES :])
        if run.parent is not None and self._only_padded(run, rest):
            run.children.clear()
            run.order.clear()
            run.tokens += rest
            run.blocks += _null_blocks(rest)
            return
        add_child(run, Run(run, run.end_block, rest, _null_blocks(rest)))

    @staticmethod
    def _only_padded(run: Run, rest: bytes) -> bool:
        """Whether all that follows the run is an end of a sequence that ``rest`` continues."""
        if not run.children:
            return True
        key = run.order[0]
        known = len(key)
        while known and key[known - TOKEN_BYTES : known] == PADDING[:TOKEN_BYTES]:
            known -= TOKEN_BYTES
        is_end = known < len(key) and len(run.order) == 1 and not run.children[key].children
        return is_end and rest.startswith(key[:known])


def _null_blocks(key: bytes) -> "array[int]":
    return array("i", [NULL_BLOCK]) * (len(key) // BLOCK_KEY_BYTES)
