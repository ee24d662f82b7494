"""Mamba's selective state space as a :class:`strandline.kernels.recurrences.recurrence.Recurrence`.

Shape suffixes: T tokens, N sequences, V channels, K dimensions of a channel's state, S slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.logged_kernels import LoggedKernels, LoggedMemory
from strandline.kernels.recurrences.mamba1 import Mamba1Inputs, mamba1_decode, mamba1_prefill
from strandline.kernels.recurrences.mamba1_log import LOG_TOKENS, LogMemory, mamba1_decode_logged, mamba1_fold
from strandline.specs import LogSpec, TensorSpec

Mamba1Memory = LoggedMemory[LogMemory]

OPERATIONS: Final[tuple[Operation[..., Any], ...]] = (mamba1_prefill, mamba1_decode, mamba1_decode_logged, mamba1_fold)

REFERENCES: Final = LoggedKernels(*(operation.reference for operation in OPERATIONS))


@dataclass(frozen=True, eq=False)
class Mamba1:
    """The selective state space of one layer: equal to itself alone, as no two layers' states decay alike.

    Args:
        A_log_VK: of the layer, filled before it computes.
    """

    A_log_VK: Tensor
    state_dtype: str
    kernels: LoggedKernels = REFERENCES

    operations: ClassVar = OPERATIONS

    def with_kernels(self, kernels: Kernels) -> "Mamba1":
        """Return the recurrence as these kernels compute it."""
        return replace(self, kernels=LoggedKernels(*(kernels[operation] for operation in OPERATIONS)))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("state", tuple(self.A_log_VK.shape), self.state_dtype, is_recurrent=True),)

    @cached_property
    def log(self) -> LogSpec:
        num_channels, state_dim = self.A_log_VK.shape
        sizes = {"step": num_channels, "input": num_channels, "B": state_dim}
        tensors = (TensorSpec(name, (LOG_TOKENS, size), "float32") for name, size in sizes.items())
        return LogSpec(LOG_TOKENS, tuple(tensors))

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Mamba1Memory:
        """Return the layer's memory as the kernels take it."""
        return LoggedMemory(states["state"], LogMemory(log["step"], log["input"], log["B"]) if log else None)

    def prefill(self, inputs: Mamba1Inputs, memory: Mamba1Memory, slots: Slots, chunks: ChunkTable) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_TV``."""
        return self.kernels.prefill(inputs, memory.state_SX, slots, chunks)

    def decode(self, inputs: Mamba1Inputs, memory: Mamba1Memory, slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each; return ``out_TV``."""
        return self.kernels.advance(inputs, memory, slots, log)

    def fold(self, memory: Mamba1Memory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Fold N logs into the states in N slots."""
        if memory.log is not None:
            self.kernels.fold(memory.state_SX, memory.log, self.A_log_VK.unsqueeze(0), slot_N, log_N, len_N)
