"""Addresses of a step's rows on a CPU: one pass over the sequences (``step.py``).

Shape suffixes as in ``step.py``.
"""

# mypy: ignore-errors

import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NULL_BLOCK
from strandline.kernels.runtime_numba import arguments, claim, int32s, ints, kernel
from strandline.kernels.step import PlannedStep, RowAddresses


def locate_rows(planned: PlannedStep, block_table_NM: Tensor, *, are_single: bool = False) -> RowAddresses:
    """Numba version of :func:`strandline.kernels.step.locate_rows`; the rows of the table, int32, are contiguous."""
    del are_single
    named, num_rows = planned.columns, len(planned.token_ids_T)
    columns = (planned.query_starts_N1, named.start, named.end, named.kv_start, named.rotary_delta)
    query_starts_N1, start_N, end_N, kv_start_N, rotary_delta_N = (column.contiguous() for column in columns)
    found = torch.empty((len(RowAddresses._fields), num_rows), dtype=torch.int64)
    _locate(
        1,
        num_sequences=len(start_N),
        num_rows=num_rows,
        query_starts=query_starts_N1.data_ptr(),
        start=start_N.data_ptr(),
        end=end_N.data_ptr(),
        kv_start=kv_start_N.data_ptr(),
        rotary_delta=rotary_delta_N.data_ptr(),
        table=block_table_NM.data_ptr(),
        table_stride=block_table_NM.stride(0),
        num_blocks=block_table_NM.shape[1],
        found=found.data_ptr(),
    )
    return RowAddresses(*found)


@kernel("num_sequences num_rows query_starts start end kv_start rotary_delta table table_stride num_blocks found")
def _locate(tasks):
    args = arguments(tasks)
    query_starts = ints(args.query_starts, args.num_sequences + 1)
    start, end = ints(args.start, args.num_sequences), ints(args.end, args.num_sequences)
    kv_start, delta = ints(args.kv_start, args.num_sequences), ints(args.rotary_delta, args.num_sequences)
    table = int32s(args.table, args.num_sequences * args.table_stride)
    found = ints(args.found, 4 * args.num_rows)
    task = claim(tasks)
    while task < args.num_tasks:
        for n in range(args.num_sequences):
            for row in range(query_starts[n], query_starts[n + 1]):
                position = start[n] + row - query_starts[n]
                index, block = position // BLOCK_TOKENS, NULL_BLOCK
                if kv_start[n] <= position < end[n] and index < args.num_blocks:
                    block = table[n * args.table_stride + index]
                found[row] = position
                found[args.num_rows + row] = block
                found[2 * args.num_rows + row] = position % BLOCK_TOKENS
                found[3 * args.num_rows + row] = position + delta[n]
        task = claim(tasks)
