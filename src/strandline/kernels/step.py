"""What surrounds the model in a step: addresses of rows, integers and tokens on their way, final hidden states.

Invariant: the null slot's hidden state is never written.

Shape suffixes: T rows of the step, N sequences, M blocks per table, P tokens that the next step may need, I integers
of a buffer, S slots, E hidden size, D drafts of a sequence.
"""

import ctypes
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from strandline.ids import BLOCK_TOKENS, NULL_SLOT
from strandline.kernels.operation import numba, operation, triton

Column = TypeVar("Column", np.ndarray, Tensor)


class SequenceColumns(NamedTuple, Generic[Column]):
    """What every sequence of a step has, by name: int64 ``[N]``, arrays on the host or tensors on the device.

    A column named here is included in batches, padded steps and CUDA graphs.
    """

    # Fields of a ``SequencePlan``.
    start: Column
    end: Column
    kv_start: Column
    state_src: Column
    state_dst: Column
    log: Column
    num_logged: Column
    num_folded: Column
    pending: Column
    rotary_delta: Column
    """Added to the positions of tokens of text for rotary embeddings."""
    num_drafts: Column
    next_drafts: Column
    # Of this step on this device.
    last_row: Column
    """The sequence's last row of the step."""
    source_row: Column
    """The sequence's row in the last step, if its token is pending."""
    stop_ids: Column
    """``[N, MAX_STOP_IDS]``: stop tokens that may end it, which the device compares; ``NO_TOKEN``: none."""


class PlannedStep(NamedTuple):
    """Sequences of a step, as the host plans them and the device completes them.

    Tensors keep their addresses, so that a CUDA graph can read them.
    """

    token_ids_T: Tensor
    """Tokens of the rows; with drafts, as many as all sequences may have: a certain token of each, and its drafts,
    where sequences without rows are last."""
    query_starts_N1: Tensor
    """Offsets of the sequences' rows; with drafts, one more: where the rows of no sequence end."""
    columns: SequenceColumns[Tensor]


class RowAddresses(NamedTuple):
    """Where the rows of a step are in their sequences and in blocks, int64 each."""

    positions_T: Tensor
    write_blocks_T: Tensor
    """The block that takes the row's keys and values; the null block: none."""
    write_offsets_T: Tensor
    rotary_T: Tensor
    """The row's position for rotary embeddings."""


@operation(triton("step_triton"), numba("step_numba"))
def locate_rows(planned: PlannedStep, block_table_NM: Tensor, *, are_single: bool = False) -> RowAddresses:
    """Return the address of every row. Each belongs to a sequence, whose rows have the positions from ``start`` on.

    No block takes rows before ``kv_start``, which shared blocks hold already, or from ``end`` on, which pad the step.

    Args:
        are_single: whether every sequence has one row, so that backends need not look for it.
    """
    del are_single
    columns, starts_N1 = planned.columns, planned.query_starts_N1
    row_T = torch.arange(len(planned.token_ids_T), device=starts_N1.device)
    sequence_T = torch.searchsorted(starts_N1[1:], row_T, right=True)
    positions_T = row_T + (columns.start - starts_N1[:-1])[sequence_T]
    is_written_T = (positions_T >= columns.kv_start[sequence_T]).logical_and_(positions_T < columns.end[sequence_T])
    # What is not written may lie past the table; it gets the null block.
    index_T = (positions_T // BLOCK_TOKENS).clamp_(max=block_table_NM.shape[1] - 1)
    write_blocks_T = block_table_NM[sequence_T, index_T].mul_(is_written_T).long()
    rotary_T = positions_T + columns.rotary_delta[sequence_T]
    return RowAddresses(positions_T, write_blocks_T, positions_T % BLOCK_TOKENS, rotary_T)


@operation(triton("step_triton"))
def store_hidden(hidden_TE: Tensor, rows_N: Tensor, hidden_SE: Tensor, slots_N: Tensor) -> None:
    """Store rows of the step's final hidden states in slots; the null slot drops its row."""
    if NULL_SLOT in slots_N.tolist():
        kept_N = slots_N != NULL_SLOT
        rows_N, slots_N = rows_N[kept_N], slots_N[kept_N]
    hidden_SE.index_copy_(0, slots_N, hidden_TE.index_select(0, rows_N))


@operation(triton("step_triton"))
def fetch_integers(host_I: Tensor, buffer_I: Tensor) -> None:
    """Copy integers to the device, in the order of the stream.

    Args:
        host_I: in pinned memory where the device is a GPU. It must stay as it is until the device has got there.
    """
    buffer_I.copy_(host_I)


@operation(triton("step_triton"))
def hand_over_tokens(token_N: Tensor, sampled_P: Tensor, address_1: Tensor) -> None:
    """Store tokens for the next step, and on the host.

    Args:
        address_1: int64, of memory on the host for as many int64, pinned where the device is a GPU.
    """
    sampled_P[: len(token_N)].copy_(token_N)
    _store_on_host(token_N, address_1)


@operation(triton("step_triton"))
def hand_over_drafts(
    tokens_T: Tensor, num_accepted_N: Tensor, drafts_ND: Tensor, drafts_PD: Tensor, address_1: Tensor
) -> None:
    """Store drafts for the next step, and on the host what a step has found: tokens, accepted drafts, next drafts.

    Args:
        address_1: as of ``hand_over_tokens``.
    """
    num_sequences, num_drafts = drafts_ND.shape
    drafts_PD[:num_sequences, :num_drafts].copy_(drafts_ND)
    _store_on_host(torch.cat((tokens_T, num_accepted_N, drafts_ND.flatten())), address_1)


def _store_on_host(values_I: Tensor, address_1: Tensor) -> None:
    host_I = values_I.cpu().contiguous()
    ctypes.memmove(int(address_1), host_I.data_ptr(), host_I.nbytes)
