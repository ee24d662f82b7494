"""What surrounds the model in a step: tokens that are still on the device, and the final hidden states.

Invariant: the null slot's hidden state is never written.

Shape suffixes: T rows of the step, N sequences, M rows of the step before that were sampled, X sets of stop tokens,
I stop tokens of a set, S slots, E hidden size.
"""

import torch
from torch import Tensor

from strandline.ids import NULL_SLOT, PendingToken
from strandline.kernels.operation import operation, triton

NO_TOKEN = -1
"""Pads sets of stop tokens."""


@operation(triton("step_triton"))
def resolve_pending(
    token_ids_T: Tensor,
    dst_N: Tensor,
    last_rows_N: Tensor,
    pending_N: Tensor,
    source_rows_N: Tensor,
    sampled_M: Tensor,
    stop_sets_N: Tensor,
    stop_ids_XI: Tensor,
) -> None:
    """Fill in the tokens that the step before has sampled, in place.

    A sequence whose pending token is one of its stop tokens, and may stop it, has ended: its state is not stored. Its
    keys and values are, behind those that belong to it.

    Args:
        last_rows_N: each sequence's last row of the step, which holds the pending token.
        pending_N: ``PendingToken`` of each sequence.
        source_rows_N: where in ``sampled_M`` a pending token is.
    """
    token_N = sampled_M[source_rows_N]
    is_pending_N = pending_N != 0
    is_over_N = (pending_N == PendingToken.MAY_STOP) & (stop_ids_XI[stop_sets_N] == token_N.unsqueeze(-1)).any(-1)
    token_ids_T[last_rows_N] = torch.where(is_pending_N, token_N, token_ids_T[last_rows_N])
    dst_N.masked_fill_(is_over_N, NULL_SLOT)


@operation(triton("step_triton"))
def store_hidden(hidden_TE: Tensor, rows_N: Tensor, hidden_SE: Tensor, slots_N: Tensor) -> None:
    """Store rows of the step's final hidden states in slots; the null slot drops its row."""
    if NULL_SLOT in slots_N.tolist():
        kept_N = slots_N != NULL_SLOT
        rows_N, slots_N = rows_N[kept_N], slots_N[kept_N]
    hidden_SE.index_copy_(0, slots_N, hidden_TE.index_select(0, rows_N))
