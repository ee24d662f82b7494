"""A recurrence over a step that mixes decodes and prefills.

Shape suffixes: T tokens of the step, N sequences.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.kernels.recurrences.recurrence import Recurrence
from strandline.kernels.recurrences.replay import ReplayLog, of_step, with_logged

Inputs = TypeVar("Inputs")
Memory = TypeVar("Memory")


def advance(
    recurrence: Recurrence[Inputs, Memory],
    inputs: Callable[..., Inputs],
    tokens: Sequence[Tensor],
    batch: StepBatch,
    memory: Memory,
    log: ReplayLog,
) -> Tensor:
    """Run a recurrence over the step's tokens; return the output of each.

    Args:
        inputs: makes the recurrence's inputs of some tokens' tensors.
        tokens: tensors with a row for each token of the step.
        log: of such tensors.
    """
    num_rows, num_decodes, slots = batch.num_decode_rows, batch.num_decodes, batch.recurrent
    src_N, dst_N, outs = slots.src_N, slots.dst_N, []
    if num_rows:
        decoded = inputs(*(x[:num_rows] for x in tokens))
        outs.append(recurrence.decode(decoded, memory, src_N[:num_decodes], dst_N[:num_decodes], slots.log))
    if num_rows < len(tokens[0]) or not outs:
        prefilled = inputs(*with_logged(slots.replay, log, tuple(x[num_rows:] for x in tokens)))
        out = recurrence.prefill(prefilled, memory, src_N[num_decodes:], dst_N[num_decodes:], slots.chunks)
        outs.append(of_step(slots.replay, out))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
