"""Which run of the index each block belongs to, so that blocks can be moved."""

from collections.abc import Iterable, Sequence

from strandline.cache.lease import Lease
from strandline.cache.tree import Run
from strandline.ids import BlockId


class BlockOwners:
    """Finds the run of a block. Blocks that only a lease holds have no owner."""

    def __init__(self) -> None:
        self._run_of: dict[int, Run] = {}
        self._index_of: dict[int, int] = {}
        """By block of a run: its index in the path from the root."""

    def owner(self, block: int) -> Run | None:
        return self._run_of.get(block)

    def own(self, run: Run, blocks: Sequence[int]) -> None:
        """Record that these, the last blocks of ``run``, belong to it."""
        run_of, index_of = self._run_of, self._index_of
        for index, block in enumerate(blocks, run.end_block - len(blocks)):
            run_of[block] = run
            index_of[block] = index

    def disown(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            del self._run_of[block], self._index_of[block]

    def move(self, moves: Iterable[tuple[BlockId, BlockId]], leases: Iterable[Lease]) -> None:
        """Write the new ids ``(from, to)`` of moved blocks into their runs and into the tables of all leases."""
        own = dict[int, int]()
        shared = list[tuple[int, BlockId, BlockId]]()
        for src, dst in moves:
            run = self._run_of.pop(src, None)
            if run is None or run.is_live:
                own[src] = dst
            if run is not None:
                index = self._index_of[dst] = self._index_of.pop(src)
                run.blocks[index - run.start_block] = dst
                self._run_of[dst] = run
                shared.append((index, src, dst))
        for lease in leases:
            table = lease.table
            for index, src, dst in shared:
                if index < lease.num_published and table[index] == src:
                    table[index] = dst
            if not own.keys().isdisjoint(table[lease.num_published :]):
                for index in range(lease.num_published, len(table)):
                    table[index] = own.get(table[index], table[index])
