"""Step plans as they travel to worker processes: of block tables, what has changed since the plan before.

Both ends keep the table of every request from the plan that introduces it to the plan that it is gone in, so what is
sent of a table does not grow with the context. A worker that has missed a plan, or whose tables are not the engine's,
raises an error with that plan and with every later one.
"""

from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from strandline.errors import EngineError
from strandline.ids import RequestId
from strandline.records.actions import Action
from strandline.records.plan import NewRequest, PictureToEncode, SequencePlan, StepPlan

REQUEST_ID: Final = SequencePlan._fields.index("request_id")
TABLE: Final = SequencePlan._fields.index("block_table")


class TableChange(NamedTuple):
    """What is new in a sequence's block table."""

    sequence: int
    """Its index in the plan."""
    num_kept_bytes: int
    """How much of the last table's beginning stays."""
    added: bytes
    """What comes behind that."""
    checksum: int
    """Checksum of the whole table."""


class PackedPlan(NamedTuple):
    """A plan without block tables; its sequences field by field, which takes a third of the time to pickle."""

    number: int
    """Plans are numbered from 0."""
    columns: tuple[tuple[Any, ...], ...]
    """The fields of a ``SequencePlan`` in order, each of all sequences; empty for the block tables."""
    changes: tuple[TableChange, ...]
    actions: tuple[Action, ...]
    new: tuple[NewRequest, ...]
    gone: tuple[RequestId, ...]
    pictures: tuple[PictureToEncode, ...]


class PlanPacker:
    """The engine's end."""

    def __init__(self) -> None:
        self._tables: dict[RequestId, bytes] = {}
        self._num_plans = 0

    def pack(self, plan: StepPlan) -> PackedPlan:
        """Return what to send of the next plan. It must be sent to all workers."""
        _update(self._tables, plan.new, plan.gone)
        columns = list(zip(*plan.sequences, strict=True))
        changes = list[TableChange]()
        if columns:
            tables = self._tables
            for index, (request_id, table) in enumerate(zip(columns[REQUEST_ID], columns[TABLE], strict=True)):
                last = tables[request_id]
                if table != last:
                    num_kept = _num_equal(last, table)
                    changes.append(TableChange(index, num_kept, table[num_kept:], crc32(table)))
                    tables[request_id] = table
            columns[TABLE] = ()
        rest = (plan.actions, plan.new, plan.gone, plan.pictures)
        packed = PackedPlan(self._num_plans, tuple(columns), tuple(changes), *rest)
        self._num_plans += 1
        return packed

    def forget_requests(self) -> None:
        """Drop all tables."""
        self._tables.clear()


class PlanUnpacker:
    """A worker's end."""

    def __init__(self) -> None:
        self._tables: dict[RequestId, bytes] = {}
        self._num_plans = 0

    def unpack(self, packed: PackedPlan) -> StepPlan:
        """Return the plan.

        Raises:
            EngineError: it is not the plan after the last one, or block tables are not what they were packed from.
        """
        if packed.number != self._num_plans:
            raise EngineError(f"a worker is out of step: it got plan {packed.number} instead of {self._num_plans}")
        try:
            plan = self._apply(packed)
        except KeyError as error:
            raise EngineError(f"plan {packed.number} names {error}, which this worker does not know") from error
        self._num_plans += 1
        return plan

    def _apply(self, packed: PackedPlan) -> StepPlan:
        tables = self._tables
        _update(tables, packed.new, packed.gone)
        columns = list(packed.columns)
        for index, num_kept, added, checksum in packed.changes:
            request_id = columns[REQUEST_ID][index]
            table = tables[request_id][:num_kept] + added
            if crc32(table) != checksum:
                raise EngineError(f"the block table of {request_id} in plan {packed.number} is not the engine's")
            tables[request_id] = table
        sequences: tuple[SequencePlan, ...] = ()
        if columns:
            columns[TABLE] = tuple([tables[request_id] for request_id in columns[REQUEST_ID]])
            sequences = tuple(map(SequencePlan._make, zip(*columns, strict=True)))
        return StepPlan(sequences, packed.actions, packed.new, packed.gone, packed.pictures)

    def forget_requests(self) -> None:
        """Drop all tables."""
        self._tables.clear()


def _update(tables: dict[RequestId, bytes], new: tuple[NewRequest, ...], gone: tuple[RequestId, ...]) -> None:
    """Drop the tables of requests that are gone, and begin those of new ones, which may have the same ids."""
    for request_id in gone:
        del tables[request_id]
    for request in new:
        tables[request.request_id] = b""


def _num_equal(last: bytes, table: bytes) -> int:
    """Return how many whole ids of two tables, that are not equal, are equal from the start on, in bytes."""
    if table.startswith(last):
        return len(last)
    num_bytes = min(len(last), len(table))
    first, second = (np.frombuffer(each[:num_bytes], dtype=np.int32) for each in (last, table))
    differing = np.flatnonzero(first != second)
    return int(differing[0]) * first.itemsize if len(differing) else num_bytes
