"""Recurrences over a step that mixes decodes, sequences that verify drafts, and other prefills.

Shape suffixes: T tokens of the step, N sequences, S slots; of a window's memory R are the rows, C the channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import StepBatch
from strandline.kernels.recurrences.recurrence import Recurrence
from strandline.kernels.recurrences.rerun import DraftLog, draft_log, of_step, with_logged
from strandline.kernels.recurrences.state_recurrence import StateMemory, StateRecurrence

Mix = Callable[..., Tensor]

Inputs = TypeVar("Inputs")
Memory = TypeVar("Memory")


@dataclass(frozen=True, slots=True)
class RecurrentMemory:
    """The share of all slots and logs of a layer that has a convolution, and then a recurrence."""

    recurrent: StateMemory
    window_SRC: Tensor
    draft_log: DraftLog
    """The convolution's inputs, then what the recurrence reads besides, or all that it reads."""

    @classmethod
    def bind(cls, recurrence: StateRecurrence[Any], memory: LayerMemory) -> "RecurrentMemory":
        """Return a layer's memory as kernels take it."""
        return cls(recurrence.bind(memory.states, memory.log), memory.states["window"], draft_log(memory))

    @property
    def conv_log(self) -> DraftLog:
        """Log of the convolution alone."""
        return None if self.draft_log is None else self.draft_log[:1]

    @property
    def recurrent_log(self) -> DraftLog:
        """Log of the recurrence alone."""
        return None if self.draft_log is None else self.draft_log[1:]


def mix_parts(mix: Mix, tokens: Sequence[Tensor], batch: StepBatch) -> Tensor:
    """Return what a function gives for the rows of each part of a step.

    Args:
        mix: takes tensors with a row for each token of a part, and the part.
        tokens: tensors with a row for each token of the step.
    """
    if batch.parts is None:
        return mix(*tokens, batch)
    num_rows = batch.num_verified_rows
    rows = slice(num_rows), slice(num_rows, None)
    return torch.cat([mix(*(x[own] for x in tokens), part) for own, part in zip(rows, batch.parts, strict=True)])


def advance(
    recurrence: Recurrence[Inputs, Memory],
    inputs: Callable[..., Inputs],
    tokens: Sequence[Tensor],
    batch: StepBatch,
    memory: Memory,
    log: DraftLog,
) -> Tensor:
    """Run a recurrence over the step's tokens; return the output of each.

    Args:
        inputs: makes the recurrence's inputs of some tokens' tensors.
        tokens: tensors with a row for each token of the step.
        log: log of such tensors.
    """
    if batch.verified is not None:
        return mix_parts(lambda *own: advance(recurrence, inputs, own[:-1], own[-1], memory, log), tokens, batch)
    num_rows, recurrent, outs = batch.num_decode_rows, batch.recurrent, []
    if num_rows:
        decoded = inputs(*(x[:num_rows] for x in tokens))
        outs.append(recurrence.decode(decoded, memory, batch.decode_slots, recurrent.log))
    if num_rows < len(tokens[0]) or not outs:
        prefilled = inputs(*with_logged(recurrent.rerun, log, tuple(x[num_rows:] for x in tokens)))
        out = recurrence.prefill(prefilled, memory, batch.prefill_slots, recurrent.chunks)
        outs.append(of_step(recurrent.rerun, out))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
