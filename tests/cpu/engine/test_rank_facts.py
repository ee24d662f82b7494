"""Ranks must agree on what the engine has; what each has for itself is joined."""

from dataclasses import replace

import pytest

from strandline.device.executor import ExecutorFacts
from strandline.device.stores.lower_stores import FileFacts, LowerFacts
from strandline.engine.workers.rank_facts import join_facts
from strandline.errors import EngineError
from strandline.file_tiers import DISK
from strandline.records.path_hashes import root_hash
from strandline.records.persisted import NO_ENTRIES, PersistedBlocks, PersistedEntries
from strandline.records.tokens import encode
from strandline.specs import LayerSpec, ModelSpec, TensorSpec

SPEC = ModelSpec((LayerSpec(streams=(TensorSpec("key", (2,), "float32"),)),), 4, "float32")
FACTS = ExecutorFacts(SPEC, 100, 512, "cpu", 20, 0, needs_warm_up=False, fallbacks=(), num_ranks=2)


def with_disk(rank: int, persisted: PersistedEntries, *, num_blocks: int = 8) -> ExecutorFacts:
    files = FileFacts(DISK, num_blocks, f"/cache/{rank}", bytes([rank]), persisted=[persisted], scan_s=float(rank))
    return replace(FACTS, lower=LowerFacts(4, files=files))


def test_each_phase_took_as_long_as_on_the_slowest_rank() -> None:
    phases = [{"weights": 1.0, "memory": 5.0}, {"weights": 2.0, "memory": 3.0}]
    joined, renames = join_facts([replace(FACTS, start_s=start_s) for start_s in phases])
    assert (joined, renames) == (replace(FACTS, start_s={"weights": 2.0, "memory": 5.0}), [])


def test_ranks_that_do_not_agree_are_refused() -> None:
    for other in (replace(FACTS, num_slabs=21), with_disk(1, NO_ENTRIES), replace(FACTS, lower=LowerFacts(3))):
        with pytest.raises(EngineError, match="ranks do not agree"):
            join_facts([FACTS, other])
    with pytest.raises(EngineError, match="ranks do not agree"):
        join_facts([with_disk(0, NO_ENTRIES), with_disk(1, NO_ENTRIES, num_blocks=9)])


def test_disks_of_ranks_become_one() -> None:
    tokens = encode(range(64))
    persisted = [
        PersistedEntries((PersistedBlocks("t", root_hash("t"), tokens, (address,), 0, 1.0, is_shared=False),), ())
        for address in (3, 7)
    ]
    joined, renames = join_facts([with_disk(rank, persisted[rank]) for rank in (0, 1)])
    [block] = persisted[0].blocks
    expected = PersistedEntries((block._replace(addresses=(1,)),), ())
    assert joined.lower.files == FileFacts(DISK, 8, "/cache/0", b"\0", persisted=[expected], scan_s=1.0)
    assert renames == [{3: 1}, {7: 1}]


def test_the_disk_of_one_rank_stays_as_it_is() -> None:
    alone = with_disk(0, NO_ENTRIES)
    assert join_facts([alone]) == (alone, [])
