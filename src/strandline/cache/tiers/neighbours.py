"""A tier's nearest snapshots above and below others, whose worth depends on them."""

from collections.abc import Iterator

from strandline.cache.tiers.stored import Column, Copy, TierSnapshot
from strandline.cache.traversal import continuations
from strandline.cache.walk import PathEnd
from strandline.records.tokens import BLOCK_KEY_BYTES


def next_below(column: Column, removed: TierSnapshot) -> Iterator[Copy]:
    """Yield a tier's nearest snapshots below one that it had."""
    run, (depth, tail) = removed.home, removed.key
    longer = [copy for copy in column.copies_after(run, depth, tail) if copy.snapshot is not removed]
    if longer:
        yield min(longer, key=lambda copy: copy.position)
        return
    if depth < run.end_block:
        waiting = [run] if run.tokens.startswith(tail, (depth - run.start_block) * BLOCK_KEY_BYTES) else []
    else:
        waiting = [child for child in continuations(run) if child.tokens.startswith(tail)]
    while waiting:
        node = waiting.pop()
        below = column.first_after(node, depth)
        if below is not None:
            yield below
        elif column.num_blocks_in(node):
            waiting.extend(continuations(node))


def end_above(column: Column, left: PathEnd, removed: TierSnapshot) -> Copy | None:
    """Return a tier's nearest snapshot above one that is being removed, if the tier has no continuation of it.

    Args:
        left: what is left of the path to the one that is being removed, which is still in the tree.
    """
    if column.num_children(left):
        return None
    above = column.above(removed)
    return above if above is not None and above.snapshot.num_blocks == left.depth else None


def saved_tokens(column: Column, snapshot: TierSnapshot, *, at_most: int | None = None) -> int:
    """Return how many tokens a snapshot that is about to enter a tier saves: those since the nearest one above.

    Args:
        column: that of the tier.
        at_most: those since the nearest one elsewhere; None: there is none.
    """
    above = column.above(snapshot)
    saved = snapshot.position - (0 if above is None else above.position)
    return saved if at_most is None else min(saved, at_most)
