"""The most that a cache could hit: the longest common prefix with anything seen before. Forgets nothing."""

from array import array

from strandline.cache.tree import Run, tail_that_begins
from strandline.cache.tree_changes import add_child, remove_child, split
from strandline.cache.walk import walk
from strandline.ids import NULL_BLOCK
from strandline.records.tokens import BLOCK_KEY_BYTES, TOKEN_BYTES


class SeenPrefixes:
    """All sequences seen so far."""

    def __init__(self) -> None:
        self._root = _run(None, 0, b"")

    def add(self, data: bytearray) -> int:
        """Remember a sequence; return how many of its leading tokens some earlier one shares."""
        end = walk(self._root, data)
        run, rest = end.run, bytes(data[end.num_blocks * BLOCK_KEY_BYTES :])
        if len(rest) > end.partial_tokens * TOKEN_BYTES:
            if run.start_block < end.num_blocks < run.end_block:
                run = split(run, end.num_blocks)
            self._append(run, rest)
        return end.kv_tokens

    def _append(self, run: Run, rest: bytes) -> None:
        """Let a run be continued by tokens that none of its children begins with."""
        tail = tail_that_begins(run, rest[:BLOCK_KEY_BYTES])
        if tail is not None:
            remove_child(tail, ghost_tokens=0)
        inside = len(rest) % BLOCK_KEY_BYTES
        whole, partial = rest[: len(rest) - inside], rest[len(rest) - inside :]
        if whole and run.parent is not None and not run.children:
            run.append(whole, _null_blocks(whole))
        elif whole:
            add_child(run, child := _run(run, run.end_block, whole))
            run = child
        if partial:
            add_child(run, _run(run, run.end_block, partial))


def _run(parent: Run | None, start_block: int, key: bytes) -> Run:
    return Run(parent, start_block, key, _null_blocks(key))


def _null_blocks(key: bytes) -> "array[int]":
    return array("i", [NULL_BLOCK]) * -(-len(key) // BLOCK_KEY_BYTES)
