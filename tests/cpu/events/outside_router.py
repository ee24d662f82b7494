"""A router outside of a server, which supports blocks alone and knows of hashes what ``docs/events.md`` says."""

import struct
from collections.abc import Sequence
from hashlib import sha256

from strandline.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, WireEvent

BLOCK_TOKENS = 64


class OutsideRouter:
    """The blocks that an engine has announced. An ``EventSink``."""

    def __init__(self) -> None:
        self._blocks = set[int]()

    def apply(self, event: WireEvent) -> None:
        match event:
            case BlockStored(group_idx=0):
                self._blocks.update(event.block_hashes)
            case BlockRemoved(group_idx=0):
                self._blocks.difference_update(event.block_hashes)
            case AllBlocksCleared():
                self.clear()

    def clear(self) -> None:
        self._blocks.clear()

    def num_blocks(self, tokens: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt without a salt are announced."""
        block_hash = sha256(b"strandline\0").digest()
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            block = struct.pack(f">{BLOCK_TOKENS}I", *tokens[end - BLOCK_TOKENS : end])
            block_hash = sha256(b"\0" + block_hash + block).digest()
            if int.from_bytes(block_hash[-8:], "big") not in self._blocks:
                return end // BLOCK_TOKENS - 1
        return len(tokens) // BLOCK_TOKENS
