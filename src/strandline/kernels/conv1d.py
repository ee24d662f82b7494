"""Depthwise causal convolution over time, with the last inputs of every sequence kept in its slot.

Token ``t`` of a channel becomes ``sum_j weight[j] * x[t - W + 1 + j] + bias``, where inputs before the
sequence's new tokens come from its *window*: the W - 1 inputs before them, token-major, oldest first.

Invariants: the null slot reads as zeros, and its memory is neither used nor written; every window is read
before any is written. Products accumulate in float32; results are rounded to x's dtype before the activation.

Shape suffixes: T tokens, N sequences, C channels, W taps of the filter, S slots, R rows of a window's memory,
P = W - 1 rows of a window, E places where a window is written (ends of sequences, cuts), B batch, X inputs.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.platform import has_twins

Activation = Literal["silu"] | None


@has_twins(triton="conv1d_triton", numba="conv1d_numba")
def causal_conv1d_prefill(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SRC: Tensor,
    src_N: Tensor,
    offset_N: Tensor,
    dst_N: Tensor,
    chunks: ChunkTable,
    activation: Activation,
) -> Tensor:
    """Convolve the new tokens of N sequences; return ``y_TC`` in x's dtype.

    Reads each sequence's window from rows ``[offset, offset + W - 1)`` of slot ``src``, writes the window after
    its last token to rows ``[0, W - 1)`` of slot ``dst``, and the window at each cut to the cut's slot.
    """
    window_NPC = _read_windows(window_SRC, src_N, offset_N, weight_CW).to(x_TC.dtype)
    y_TC = _convolve(x_TC.unsqueeze(0), weight_CW, bias_C, padding=weight_CW.shape[1] - 1)[0, : len(x_TC)]
    _convolve_heads(y_TC, x_TC, weight_CW, bias_C, window_NPC, chunks)
    _write_windows(window_SRC, x_TC, window_NPC, dst_N, chunks)
    return _activate(y_TC, activation)


@has_twins(triton="conv1d_triton", numba="conv1d_numba")
def causal_conv1d_update(
    x_NC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_SRC: Tensor,
    src_N: Tensor,
    offset_N: Tensor,
    dst_N: Tensor,
    activation: Activation,
) -> Tensor:
    """Convolve one new token of each of N sequences; return ``y_NC``. Windows as in the prefill."""
    window_NPC = _read_windows(window_SRC, src_N, offset_N, weight_CW).to(x_NC.dtype)
    inputs_NWC = torch.cat((window_NPC, x_NC.unsqueeze(1)), dim=1)
    # One output each: torch would plan a convolution for longer than it computes. In its order, so that no bit differs.
    inputs_WNC = inputs_NWC.float().unbind(1)
    weights_WC = weight_CW.t().to(torch.float32, memory_format=torch.contiguous_format).unbind(0)
    y_NC = inputs_WNC[0] * weights_WC[0]
    for tap_NC, tap_C in zip(inputs_WNC[1:], weights_WC[1:], strict=True):
        y_NC.addcmul_(tap_NC, tap_C)
    y_NC = (y_NC if bias_C is None else y_NC.add_(bias_C)).to(x_NC.dtype)
    _store(window_SRC, dst_N, inputs_NWC[:, 1:])
    return _activate(y_NC, activation)


def _read_windows(window_SRC: Tensor, src_N: Tensor, offset_N: Tensor, weight_CW: Tensor) -> Tensor:
    num_rows = weight_CW.shape[1] - 1
    if window_SRC.shape[1] == num_rows:
        # No room for a log, so no offset but 0: whole slots are copied, many times faster than single rows.
        window_NPC = window_SRC.index_select(0, src_N)
    else:
        row_P = torch.arange(num_rows, device=src_N.device)
        window_NPC = window_SRC[src_N.unsqueeze(-1), offset_N.unsqueeze(-1) + row_P]
    if NULL_SLOT in src_N.tolist():
        window_NPC.masked_fill_((src_N == NULL_SLOT).view(-1, 1, 1), 0)
    return window_NPC


def _convolve(x_BXC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, padding: int) -> Tensor:
    """Filter along X. As an image of one row in channels-last layout: the one form that torch runs token-major."""
    image_BC1X = x_BXC.unsqueeze(1).permute(0, 3, 1, 2)
    weight_C11W = weight_CW.view(*weight_CW.shape[:1], 1, 1, -1)
    y_BC1X = F.conv2d(image_BC1X, weight_C11W, bias_C, padding=(0, padding), groups=len(weight_CW))
    return y_BC1X.squeeze(2).transpose(1, 2)


def _convolve_heads(
    y_TC: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window_NPC: Tensor,
    chunks: ChunkTable,
) -> None:
    """Overwrite the first W - 1 rows of every sequence, which reach into its window, in ``y_TC``."""
    start_N, end_N = _row_bounds(chunks, len(x_TC))
    row_NP = start_N.unsqueeze(-1) + torch.arange(window_NPC.shape[1], device=start_N.device)
    is_row_NP = row_NP < end_N.unsqueeze(-1)
    head_NPC = x_TC[torch.where(is_row_NP, row_NP, start_N.unsqueeze(-1))]
    y_NPC = _convolve(torch.cat((window_NPC, head_NPC), dim=1), weight_CW, bias_C, padding=0)
    y_TC[row_NP[is_row_NP]] = y_NPC[is_row_NP]


def _write_windows(window_SRC: Tensor, x_TC: Tensor, window_NPC: Tensor, dst_N: Tensor, chunks: ChunkTable) -> None:
    """Store the W - 1 inputs before every sequence's end and before every cut."""
    start_N, end_N = _row_bounds(chunks, len(x_TC))
    cuts = [chunk for chunk, slot in enumerate(chunks.cut_slots) if slot != NULL_SLOT]
    sequence_N = torch.arange(len(dst_N), device=dst_N.device)
    slot_E, end_E, sequence_E = dst_N, end_N, sequence_N
    if cuts:
        cut_E = torch.tensor(cuts, device=dst_N.device)
        slot_E = torch.cat((dst_N, chunks.cut_slots_C[cut_E]))
        end_E = torch.cat((end_N, chunks.starts_C[cut_E] + chunks.lengths_C[cut_E]))
        owner_E = torch.searchsorted(chunks.first_chunks_N1, cut_E, right=True) - 1
        sequence_E = torch.cat((sequence_N, owner_E))
    num_rows = window_NPC.shape[1]
    # Rows count from the sequence's start: negative ones lie in its window.
    row_EP = (end_E - start_N[sequence_E] - num_rows).unsqueeze(-1) + torch.arange(num_rows, device=dst_N.device)
    new_EPC = x_TC[start_N[sequence_E].unsqueeze(-1) + row_EP.clamp_min(0)]
    old_EPC = window_NPC[sequence_E.unsqueeze(-1), (row_EP + num_rows).clamp_max(num_rows - 1)]
    _store(window_SRC, slot_E, torch.where((row_EP >= 0).unsqueeze(-1), new_EPC, old_EPC))


def _row_bounds(chunks: ChunkTable, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the first row of every sequence and the row after its last."""
    start_N = chunks.starts_C[chunks.first_chunks_N1[:-1]]
    return start_N, torch.cat((start_N[1:], start_N.new_tensor([num_rows])))


def _store(window_SRC: Tensor, slot_E: Tensor, window_EPC: Tensor) -> None:
    if NULL_SLOT in slot_E.tolist():
        kept_E = slot_E != NULL_SLOT
        slot_E, window_EPC = slot_E[kept_E], window_EPC[kept_E]
    window_SRC[:, : window_EPC.shape[1]].index_copy_(0, slot_E, window_EPC.to(window_SRC.dtype))


def _activate(y_TC: Tensor, activation: Activation) -> Tensor:
    return y_TC if activation is None else F.silu(y_TC, inplace=True)
