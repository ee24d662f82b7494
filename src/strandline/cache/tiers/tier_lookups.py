"""Lookups in the tree of a tier: where a prompt could resume, and the position of the snapshot above another.

Both go up from the end of the path to the device's hit or the nearest snapshot. They change nothing.
"""

from typing import NamedTuple

from strandline.cache.policy.resume_rules import first_gap
from strandline.cache.resume import Match, first_block_seen
from strandline.cache.tiers.tier_tree import TierBlock, TierSnapshot, descend
from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import BLOCK_KEY_BYTES, resumable_end


class TierEnd(NamedTuple):
    """Where a prompt could resume."""

    block: TierBlock
    """The last whole block before it."""
    snapshot: TierSnapshot | None
    """None for models that keep no states."""
    position: int


def find_end(
    root: TierBlock, data: bytearray, match: Match, window_tokens: int, *, has_slots: bool, is_persistent: bool
) -> TierEnd | None:
    """Return the deepest position at which a prompt could resume beyond its hit on the device, or None.

    Args:
        data: the prompt, encoded.
        match: its hit on the device.
        window_tokens: tokens before a position that resuming there reads, itself among them.
        has_slots: whether the model keeps states.
        is_persistent: whether blocks without an address may be being written to the tier; else they are on the device.
    """
    node, depth = descend(root, data, len(data) // BLOCK_KEY_BYTES)
    best: TierEnd | None = None
    first = 0
    while depth >= match.position // BLOCK_TOKENS:
        if best is None:
            best = _end_at(node, depth, data, match, has_slots=has_slots)
            first = 0 if best is None else first_block_seen(best.position, window_tokens)
        elif not is_persistent:
            break
        if depth <= first:
            break
        if not node.address and first_gap(match.end.run, min(match.end.num_blocks, depth), depth - 1) < depth:
            best = None
        if node.parent is None:
            break
        node, depth = node.parent, depth - 1
    return best


def _end_at(node: TierBlock, depth: int, data: bytearray, match: Match, *, has_slots: bool) -> TierEnd | None:
    """Return where a prompt could resume between the end of the block at this depth and that of the next."""
    if not has_slots:
        position = depth * BLOCK_TOKENS
        return TierEnd(node, None, position) if resumable_end(data, position) > match.end.kv_tokens else None
    for snapshot in sorted(node.snapshots.values(), key=lambda snapshot: -snapshot.position):
        is_deeper = snapshot.position > match.position
        if snapshot.address and is_deeper and data.startswith(snapshot.key, depth * BLOCK_KEY_BYTES):
            return TierEnd(node, snapshot, snapshot.position)
    return None


def position_above(root: TierBlock | None, data: bytes, position: int, *, down_to: int = 0) -> int:
    """Return the position of the nearest snapshot above one that is about to enter, or ``down_to`` if that is nearer.

    Args:
        data: the tokens before it, encoded.
    """
    if root is None:
        return down_to
    node, depth = descend(root, data, position // BLOCK_TOKENS)
    while (depth + 1) * BLOCK_TOKENS > down_to:
        offset, found = depth * BLOCK_KEY_BYTES, node.snapshots.items()
        above = [x.position for key, x in found if x.position < position and data.startswith(key, offset)]
        if above or node.parent is None:
            return max(down_to, *above) if above else down_to
        node, depth = node.parent, depth - 1
    return down_to
