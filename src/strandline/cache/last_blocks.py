"""Which runs hold the last blocks that snapshots need, where several may begin with the same tokens."""

from strandline.cache.tree import Run, Snapshot, child_with_prefix


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
