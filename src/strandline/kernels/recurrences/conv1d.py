"""Depthwise causal convolution over time, with the last inputs of every sequence kept in its slot.

Token ``t`` of a channel becomes ``sum_j weight[j] * x[t - W + 1 + j] + bias``, where inputs before the
sequence's new tokens come from its *window*: the W - 1 inputs before them, token-major, oldest first.

Invariants: the null slot reads as zeros, and its memory is neither used nor written; every window is read
before any is written. Sums accumulate in float32; results are rounded to x's dtype before the activation.

Shape suffixes: T tokens, N sequences, C channels, W taps of the filter, S slots, R rows of a window's memory,
P = W - 1 rows of a window, X inputs of a sequence, those of its window first.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import NULL_SLOT
from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import FLOATS, numba, operation, triton
from strandline.kernels.recurrences.rerun import insert_logged

Activation = Literal["silu"] | None


class Convolution(NamedTuple):
    """What a layer convolves with."""

    weight_CW: Tensor
    bias_C: Tensor | None = None
    activation: Activation = "silu"


@operation(triton("recurrences.conv1d_triton"), numba("recurrences.conv1d_numba", memory={"window": FLOATS}))
def causal_conv1d_prefill(
    x_TC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots, chunks: ChunkTable
) -> Tensor:
    """Convolve the new tokens of N sequences; return ``y_TC`` in x's dtype.

    Reads each sequence's window from the first W - 1 rows of slot ``src``, writes the window after its last token to
    those of slot ``dst``, and the window at each cut to the cut's slot.
    """
    weight_CW, bias_C, activation = convolution
    y_TC, weight_WC = torch.empty_like(x_TC), _transpose(weight_CW)
    window_NPC = _read_windows(window_SRC, slots.src_N, len(weight_WC) - 1).to(x_TC.dtype)
    for i, (first_window_PC, dst) in enumerate(zip(window_NPC, slots.dst_N.tolist(), strict=True)):
        window_PC = first_window_PC
        for chunk in range(chunks.first_chunks[i], chunks.first_chunks[i + 1]):
            num_tokens = chunks.lengths[chunk]
            rows = slice(chunks.starts[chunk], chunks.starts[chunk] + num_tokens)
            inputs_XC = torch.cat((window_PC, x_TC[rows]))
            y_TC[rows] = _filter(
                [inputs_XC[tap : tap + num_tokens] for tap in range(len(weight_WC))], weight_WC, bias_C
            )
            window_PC = inputs_XC[num_tokens:]
            _write_window(window_SRC, chunks.cut_slots[chunk], window_PC)
        _write_window(window_SRC, dst, window_PC)
    return _activate(y_TC, activation)


@operation(triton("recurrences.conv1d_rerun_triton"), numba("recurrences.conv1d_numba", memory={"window": FLOATS}))
def causal_conv1d_rerun(
    inputs: tuple[Tensor, ...],
    log: tuple[Tensor, ...],
    rerun: RerunBatch,
    convolution: Convolution,
    window_SRC: Tensor,
    slots: Slots,
    chunks: ChunkTable,
) -> tuple[Tensor, ...]:
    """Put logged inputs before the step's own, as ``insert_logged``, and convolve the first input of all of them.

    Return all inputs, the first convolved; rows outside all chunks hold anything. Windows as in the prefill.
    """
    x_TC, *others = insert_logged.reference(rerun, log, inputs)
    return causal_conv1d_prefill.reference(x_TC, convolution, window_SRC, slots, chunks), *others


@operation(triton("recurrences.conv1d_triton"), numba("recurrences.conv1d_numba", memory={"window": FLOATS}))
def causal_conv1d_update(x_NC: Tensor, convolution: Convolution, window_SRC: Tensor, slots: Slots) -> Tensor:
    """Convolve one new token of each of N sequences; return ``y_NC``. Windows as in the prefill."""
    weight_CW, bias_C, activation = convolution
    weight_WC = _transpose(weight_CW)
    window_NPC = _read_windows(window_SRC, slots.src_N, len(weight_WC) - 1).to(x_NC.dtype)
    inputs_NWC = torch.cat((window_NPC, x_NC.unsqueeze(1)), dim=1)
    for inputs_WC, dst in zip(inputs_NWC, slots.dst_N.tolist(), strict=True):
        _write_window(window_SRC, dst, inputs_WC[1:])
    return _activate(_filter(inputs_NWC.unbind(1), weight_WC, bias_C), activation)


def _read_windows(window_SRC: Tensor, src_N: Tensor, num_rows: int) -> Tensor:
    zeros_PC = torch.zeros_like(window_SRC[0, :num_rows])
    return torch.stack([window_SRC[slot, :num_rows] if slot != NULL_SLOT else zeros_PC for slot in src_N.tolist()])


def _write_window(window_SRC: Tensor, slot: int, window_PC: Tensor) -> None:
    if slot != NULL_SLOT:
        window_SRC[slot, : len(window_PC)] = window_PC


def _transpose(weight_CW: Tensor) -> Tensor:
    return weight_CW.t().to(torch.float32, memory_format=torch.contiguous_format)


def _filter(inputs: Sequence[Tensor], weight_WC: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return the filter's outputs, given what each tap multiplies, in the dtype of that."""
    y = inputs[0] * weight_WC[0]
    for tap, weight_C in zip(inputs[1:], weight_WC[1:], strict=True):
        y += tap * weight_C
    return (y if bias_C is None else y + bias_C).to(inputs[0].dtype)


def _activate(y_TC: Tensor, activation: Activation) -> Tensor:
    return y_TC if activation is None else F.silu(y_TC, inplace=True)
