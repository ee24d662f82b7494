"""Which runs hold the last blocks that snapshots need, where several may begin with the same tokens."""

from strandline.cache.tree import Run, Snapshot, child_with_prefix, children_with_prefix


def snapshots_that_need(run: Run) -> list[Snapshot]:
    """Return the snapshots of the parent whose tokens only the one block of a childless run holds."""
    parent = run.parent
    if parent is None:
        return []
    return [
        snapshot
        for snapshot in parent.snapshots_in(run.start_block, run.first_key)
        if snapshot.is_in_child and children_with_prefix(parent, snapshot.key[1]) == [run]
    ]


def run_of_last_block(snapshot: Snapshot) -> Run | None:
    """Return a run that holds the last block that a snapshot needs."""
    return child_with_prefix(snapshot.home, snapshot.key[1]) if snapshot.is_in_child else snapshot.home
