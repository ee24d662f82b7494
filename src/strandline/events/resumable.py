"""What one engine can resume, according to its events: predicts the hit of a prompt, to the token.

With tiers below the device it predicts an upper bound: the hit if the engine loads all that its tiers have of the
prompt.
"""

from bisect import bisect_left
from collections.abc import Iterable

from strandline.events.wire import (
    BLOCK_GROUP,
    SNAPSHOT_GROUP,
    BlockRemoved,
    BlockStored,
    WireEvent,
    wire_hash,
    wire_hashes,
)
from strandline.ids import BLOCK_TOKENS
from strandline.records.path_hashes import block_hashes, root_hash, snapshot_hash
from strandline.records.tokens import TOKEN_BYTES, encode


class PromptHashes:
    """The hashes of a prompt's prefixes, computed once for all engines.

    Args:
        tokens: token ids, or encoded tokens.
        salt: the prompt's; without it, what is cached under it cannot be predicted.
    """

    def __init__(self, tokens: Iterable[int] | bytes | bytearray, salt: str = "") -> None:
        self._data = tokens if isinstance(tokens, bytes | bytearray) else encode(tokens)
        root = root_hash(salt)
        self._hashes = [root, *block_hashes(root, self._data)]
        self.num_tokens = len(self._data) // TOKEN_BYTES
        self.blocks = wire_hashes(self._hashes[1:])
        """The hash of each whole block, as it travels."""

    def snapshot(self, num_before: int, num_rest: int) -> int:
        """Return the hash of a snapshot ``num_rest`` tokens after the first ``num_before`` blocks, as it travels."""
        start = num_before * BLOCK_TOKENS * TOKEN_BYTES
        tokens = self._data[start : start + num_rest * TOKEN_BYTES]
        return wire_hash(snapshot_hash(self._hashes[num_before], tokens))


class ResumableIndex:
    """The blocks and snapshots of one engine that events have announced.

    An engine that announces blocks without snapshots has a model without states. A prompt resumes there after its
    announced blocks, or up to 63 tokens later if the next block is cached in part: events announce whole blocks.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._snapshots: dict[int, tuple[int | None, int]] = {}
        """By hash: the hash before its last block, and the number of tokens from there."""
        self._rests: dict[int | None, dict[int, int]] = {}
        """By hash before a last block: numbers of tokens from there, each with its number of snapshots."""

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def apply(self, event: WireEvent) -> None:
        """Record an event. Groups of other kinds are ignored."""
        match event:
            case BlockStored(group_idx=group, block_hashes=hashes) if group == BLOCK_GROUP:
                self._blocks.update(hashes)
            case BlockStored(group_idx=group, block_hashes=[key]) if group == SNAPSHOT_GROUP:
                self._add_snapshot(key, event.parent_block_hash, event.block_size)
            case BlockRemoved(group_idx=group, block_hashes=hashes) if group == BLOCK_GROUP:
                self._blocks.difference_update(hashes)
            case BlockRemoved(group_idx=group, block_hashes=hashes) if group == SNAPSHOT_GROUP:
                for key in hashes:
                    self._remove_snapshot(key)
            case BlockStored() | BlockRemoved():
                pass
            case _:
                self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._snapshots.clear()
        self._rests.clear()

    def _add_snapshot(self, key: int, before: int | None, num_rest: int) -> None:
        if key not in self._snapshots:
            self._snapshots[key] = before, num_rest
            rests = self._rests.setdefault(before, {})
            rests[num_rest] = rests.get(num_rest, 0) + 1

    def _remove_snapshot(self, key: int) -> None:
        found = self._snapshots.pop(key, None)
        if found is None:
            return
        before, num_rest = found
        rests = self._rests[before]
        rests[num_rest] -= 1
        if not rests[num_rest]:
            del rests[num_rest]
        if not rests:
            del self._rests[before]

    def matched_blocks(self, prompt: PromptHashes) -> int:
        """Return how many of the prompt's first blocks are announced, as a router that reads group 0 alone would."""
        return bisect_left(prompt.blocks, True, key=lambda block: block not in self._blocks)

    def hit_tokens(self, prompt: PromptHashes) -> int:
        """Return how many of the prompt's tokens the engine would hit, at most if it has tiers below the device."""
        if not self._snapshots:
            return max(min(self.matched_blocks(prompt) * BLOCK_TOKENS, prompt.num_tokens - 1), 0)
        for num_before in range(self.matched_blocks(prompt), -1, -1):
            start = num_before * BLOCK_TOKENS
            rests = self._rests.get(prompt.blocks[num_before - 1] if num_before else None, {})
            for num_rest in sorted(rests, reverse=True):
                is_inside = start + num_rest <= prompt.num_tokens
                if is_inside and prompt.snapshot(num_before, num_rest) in self._snapshots:
                    return start + num_rest
        return 0
