"""Gated DeltaNet as a :class:`strandline.kernels.recurrences.recurrence.Recurrence`.

Shape suffixes: T tokens, N sequences, G key heads, H value heads, K key channels, V value channels, S slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

from torch import Tensor

from strandline.kernels.batch import LogBatch, ReplayBatch, Slots
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Operation
from strandline.kernels.recurrences.gdn import GatedDeltaInputs, gdn_decode, gdn_prefill
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory, gdn_decode_logged, gdn_fold
from strandline.kernels.recurrences.logged_kernels import LoggedKernels, LoggedMemory
from strandline.specs import LogSpec, TensorSpec

GatedDeltaMemory = LoggedMemory[LogMemory]

OPERATIONS: Final[tuple[Operation[..., Any], ...]] = (gdn_prefill, gdn_decode, gdn_decode_logged, gdn_fold)

REFERENCES: Final = LoggedKernels(*(operation.reference for operation in OPERATIONS))


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule of one size."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    state_dtype: str
    kernels: LoggedKernels = REFERENCES

    operations: ClassVar = OPERATIONS

    def with_kernels(self, kernels: Kernels) -> "GatedDelta":
        """Return the recurrence bound to these kernels."""
        return replace(self, kernels=LoggedKernels(*(kernels[operation] for operation in OPERATIONS)))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        shape = (self.num_heads, self.key_dim, self.value_dim)
        return (TensorSpec("state", shape, self.state_dtype, is_recurrent=True),)

    @cached_property
    def log(self) -> LogSpec:
        shapes = {
            "key": (self.num_key_heads, LOG_TOKENS, self.key_dim),
            "value": (self.num_heads, LOG_TOKENS, self.value_dim),
            "decay": (self.num_heads, LOG_TOKENS),
        }
        return LogSpec(LOG_TOKENS, tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items()))

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> GatedDeltaMemory:
        """Return the layer's memory in the form that the kernels take."""
        return LoggedMemory(states["state"], LogMemory(log["key"], log["value"], log["decay"]) if log else None)

    def prefill(
        self,
        inputs: GatedDeltaInputs,
        memory: GatedDeltaMemory,
        slots: Slots,
        chunks: ChunkTable,
        replay: ReplayBatch | None = None,
        out_THV: Tensor | None = None,
    ) -> Tensor:
        """Run over the new tokens of N sequences; return ``out_THV``, where tokens are replayed without theirs."""
        return self.kernels.prefill(inputs, memory.state_SX, slots, chunks, replay, out_THV)

    def decode(self, inputs: GatedDeltaInputs, memory: GatedDeltaMemory, slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each; return ``out_THV``."""
        return self.kernels.advance(inputs, memory, slots, log)

    def fold(self, memory: GatedDeltaMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Fold N logs into the states in N slots, in all stacked layers."""
        if memory.log is not None:
            self.kernels.fold(memory.state_SX, memory.log, slot_N, log_N, len_N)
