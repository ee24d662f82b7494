"""Recurrences that keep one state of a sequence, and some a log of decoded tokens beside it.

What a kind of layer brings is its operations, a state's shape, and its log; all of them are called alike.

Shape suffixes: N sequences, S slots, X the dimensions of one state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.binding import Kernels
from strandline.kernels.chunk_table import ChunkTable
from strandline.kernels.operation import Operation
from strandline.specs import LogSpec, TensorSpec

Inputs = TypeVar("Inputs")


@dataclass(frozen=True, eq=False, slots=True)
class LayerTensors:
    """Tensors of one layer; equal to themselves alone, so that layers that have any are not folded together."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class DecodeLog:
    """The log of a kind of recurrence."""

    spec: LogSpec
    memory: Callable[..., Any]
    """Makes what kernels take, given the spec's tensors in their order."""
    operations: tuple[Operation[..., Tensor], Operation[..., None]]
    """Decode and fold; both take the states, and such memory."""
    folded_with: LayerTensors = LayerTensors(())
    """What folds take besides: the tensors of several layers, stacked."""


class StateMemory(NamedTuple):
    """One layer's states and logs, or those of several stacked layers."""

    state_SX: Tensor
    log: Any
    """None: there are no logs."""


@dataclass(frozen=True)
class StateRecurrence(Generic[Inputs]):
    """A :class:`strandline.kernels.recurrences.recurrence.Recurrence` of one size. Its memory is a ``StateMemory``.

    Args:
        operations: prefill and decode; both take the inputs, states and slots.
        shape: X.
        decode_log: None: it keeps no log.
        functions: what runs the operations, then those of the log; None: the reference implementations.
    """

    operations: tuple[Operation[..., Tensor], Operation[..., Tensor]]
    shape: tuple[int, ...]
    state_dtype: str
    decode_log: DecodeLog | None = None
    functions: tuple[Callable[..., Any], ...] | None = None

    @property
    def all_operations(self) -> tuple[Operation[..., Any], ...]:
        """The operations, then those of the log."""
        return self.operations if self.decode_log is None else (*self.operations, *self.decode_log.operations)

    def with_kernels(self, kernels: Kernels) -> "StateRecurrence[Inputs]":
        """Return the recurrence as these kernels compute it."""
        return replace(self, functions=tuple(kernels[operation] for operation in self.all_operations))

    @cached_property
    def _functions(self) -> tuple[Callable[..., Any], ...]:
        return self.functions or tuple(operation.reference for operation in self.all_operations)

    @cached_property
    def states(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("state", self.shape, self.state_dtype, is_recurrent=True),)

    @property
    def log(self) -> LogSpec | None:
        return None if self.decode_log is None else self.decode_log.spec

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> StateMemory:
        """Return the layer's memory as the kernels take it."""
        if self.decode_log is None or log is None:
            return StateMemory(states["state"], None)
        tensors = (log[tensor.name] for tensor in self.decode_log.spec.tensors)
        return StateMemory(states["state"], self.decode_log.memory(*tensors))

    def prefill(self, inputs: Inputs, memory: StateMemory, slots: Slots, chunks: ChunkTable, *options: Any) -> Tensor:
        """Run over the new tokens of N sequences; return the output of every token.

        Args:
            options: further arguments of the operation.
        """
        out: Tensor = self._functions[0](inputs, memory.state_SX, slots, chunks, *options)
        return out

    def decode(self, inputs: Inputs, memory: StateMemory, slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each, with logs if there are any; return the outputs."""
        out: Tensor
        if log is not None and memory.log is not None:
            out = self._functions[2](inputs, memory.state_SX, slots, memory.log, log)
        else:
            out = self._functions[1](inputs, memory.state_SX, slots)
        return out

    def fold(self, memory: StateMemory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Fold N logs into the states in N slots, in all stacked layers."""
        if self.decode_log is not None and memory.log is not None:
            of_layer = (tensor.unsqueeze(0) for tensor in self.decode_log.folded_with.tensors)
            self._functions[3](memory.state_SX, memory.log, *of_layer, slot_N, log_N, len_N)
