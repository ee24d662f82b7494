"""A recurrence over a step that mixes decodes and prefills.

Shape suffixes: T tokens of the step, N sequences.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.kernels.recurrence import Recurrence

Inputs = TypeVar("Inputs")
Memory = TypeVar("Memory")


def advance(
    recurrence: Recurrence[Inputs, Memory],
    inputs: Callable[..., Inputs],
    tokens: Sequence[Tensor],
    batch: StepBatch,
    memory: Memory,
) -> Tensor:
    """Run a recurrence over the step's tokens; return the output of each.

    Args:
        inputs: makes the recurrence's inputs of some tokens' tensors.
        tokens: tensors with a row for each token of the step.
    """
    num_rows, num_decodes, slots = batch.num_decode_rows, batch.num_decodes, batch.recurrent
    src_N, dst_N, outs = slots.src_N, slots.dst_N, []
    if num_rows:
        decoded = inputs(*(x[:num_rows] for x in tokens))
        outs.append(recurrence.decode(decoded, memory, src_N[:num_decodes], dst_N[:num_decodes], slots.log))
    if num_rows < len(tokens[0]):
        prefilled = inputs(*(x[num_rows:] for x in tokens))
        outs.append(recurrence.prefill(prefilled, memory, src_N[num_decodes:], dst_N[num_decodes:], slots.chunks))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
