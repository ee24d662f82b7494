"""A :class:`strandline.kernels.recurrences.recurrence.Recurrence` that keeps one state of a sequence and no log.

What a kind of layer brings is its two operations and a state's shape; all of them are called alike.

Shape suffixes: N sequences, S slots, X the dimensions of one state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Operation
from strandline.specs import LogSpec, TensorSpec

Inputs = TypeVar("Inputs")

Pair = tuple[Callable[..., Tensor], Callable[..., Tensor]]


@dataclass(frozen=True)
class UnloggedRecurrence(Generic[Inputs]):
    """A recurrence of one size. Its memory is ``state_SX``.

    Args:
        operations: prefill and decode; both take the inputs, states and slots.
        shape: X.
        kernels: the functions that run the operations; None: the reference implementations.
    """

    operations: tuple[Operation[..., Tensor], Operation[..., Tensor]]
    shape: tuple[int, ...]
    state_dtype: str
    kernels: Pair | None = None

    def with_kernels(self, kernels: Kernels) -> "UnloggedRecurrence[Inputs]":
        """Return the recurrence as these kernels compute it."""
        prefill, decode = self.operations
        return replace(self, kernels=(kernels[prefill], kernels[decode]))

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("state", self.shape, self.state_dtype, is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        return None

    @cached_property
    def _functions(self) -> Pair:
        prefill, decode = self.operations
        return self.kernels or (prefill.reference, decode.reference)

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Tensor:
        """Return the layer's memory as the kernels take it."""
        del log
        return states["state"]

    def prefill(self, inputs: Inputs, memory: Tensor, slots: Slots, chunks: ChunkTable) -> Tensor:
        """Run over the new tokens of N sequences; return the output of every token."""
        return self._functions[0](inputs, memory, slots, chunks)

    def decode(self, inputs: Inputs, memory: Tensor, slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each; return the outputs."""
        del log
        return self._functions[1](inputs, memory, slots)

    def fold(self, memory: Tensor, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Do nothing: there is no log."""
