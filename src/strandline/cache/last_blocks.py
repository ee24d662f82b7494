"""Which runs hold the last blocks that snapshots need, where several may begin with the same tokens; and demotion."""

from strandline.cache.below import FirstTier
from strandline.cache.tree import Run, Snapshot, child_with_prefix, path_to
from strandline.errors import CacheInvariantError
from strandline.ids import BLOCK_TOKENS
from strandline.records.tokens import TOKEN_BYTES


def stubs_that_need(run: Run) -> list[Snapshot]:
    """Return the stubs whose tokens only the one block of a childless run holds."""
    parent, key = run.parent, run.first_key
    if parent is None or not parent.stubs:
        return []
    others = [other for other, child in parent.children.items() if child is not run]
    return [
        stub
        for stub_key, stub in parent.stubs.items()
        if key.startswith(stub_key) and not any(other.startswith(stub_key) for other in others)
    ]


def run_of_last_block(snapshot: Snapshot) -> Run | None:
    """Return a run that holds the last block that a snapshot needs."""
    home, key = snapshot.home, snapshot.stub_key
    return home if key is None else child_with_prefix(home, key)


def demote_snapshot(lower: FirstTier, snapshot: Snapshot) -> None:
    """Offer a snapshot, which is still in the index, to the tier below."""
    last = run_of_last_block(snapshot)
    if last is None:
        raise CacheInvariantError(f"the snapshot at {snapshot.position} has no block")
    inside = snapshot.position % BLOCK_TOKENS
    tail = last.blocks[snapshot.position // BLOCK_TOKENS - last.start_block] if inside else None
    salt, data = path_to(last)
    lower.demote_snapshot(snapshot, salt, data[: snapshot.position * TOKEN_BYTES], tail)


def demote_blocks(lower: FirstTier, run: Run, kept: int) -> None:
    """Offer the whole blocks of a childless run from ``kept`` on to the tier below."""
    if not run.is_tail:
        salt, data = path_to(run)
        first = run.start_block + kept
        lower.demote_blocks(salt, data, first, run.blocks[kept:], use=run.use, is_shared=run.is_shared)
