"""The memory and the functions of a recurrence that keeps a log.

Shape suffixes: N sequences, S slots, X the dimensions of one state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from strandline.kernels.batch import LogBatch, Slots

Log = TypeVar("Log")


@dataclass(frozen=True, slots=True)
class LoggedMemory(Generic[Log]):
    """One layer's states and logs, or those of several stacked layers."""

    state_SX: Tensor
    log: Log | None


@dataclass(frozen=True, slots=True)
class LoggedKernels:
    """The functions that advance states, in the order of a recurrence's operations."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    decode_logged: Callable[..., Tensor]
    fold: Callable[..., None]

    def advance(self, inputs: Any, memory: LoggedMemory[Any], slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each, with logs if there are any; return the outputs."""
        if log is not None and memory.log is not None:
            return self.decode_logged(inputs, memory.state_SX, slots, memory.log, log)
        return self.decode(inputs, memory.state_SX, slots)
