"""The interface of linear recurrences for layers and the runner.

*States* are stored in slots, by name; slot 0 reads as zeros and is never written. Updates of decoded tokens may be kept
in a *log* (contract 4): the sequence's states are then those in its slot, advanced over the log. To *fold* is to write
the advanced states to the slot.

Recurrences are values: equal ones compute the same, so that equal layers are folded together.

Shape suffixes: N sequences; J slots or logs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

from torch import Tensor

from strandline.kernels.arena import LayerStack
from strandline.kernels.batch import LogBatch, Slots
from strandline.kernels.chunk_table import ChunkTable
from strandline.specs import LogSpec, TensorSpec

Inputs = TypeVar("Inputs", contravariant=True)
Memory = TypeVar("Memory")

Fold = Callable[[Tensor, Tensor, Tensor], None]
"""Folds the logs ``log_N``, each of ``len_N`` tokens (1 at least), into the states in the slots ``slot_N``."""


class Recurrence(Protocol[Inputs, Memory]):
    """A linear recurrence of one size.

    ``Inputs`` are its input tensors for some tokens; ``Memory`` is a layer's memory in the form that its kernels take.
    """

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        """Tensors that it keeps per sequence."""

    @property
    def log(self) -> LogSpec | None:
        """Tensors that it keeps for tokens that are not folded yet; None: it keeps no log."""

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Memory:
        """Return the kernels' memory, given the tensors by name; with a leading dimension, that of several layers."""

    def prefill(self, inputs: Inputs, memory: Memory, slots: Slots, chunks: ChunkTable) -> Tensor:
        """Run over the new tokens of N sequences; return the output of every token.

        Reads each sequence's states from slot ``src``, writes those after its last token to slot ``dst``, and those
        after each chunk with a cut to the cut's slot.
        """

    def decode(self, inputs: Inputs, memory: Memory, slots: Slots, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each; return the outputs.

        Args:
            log: logs to append to or fold; None: the states are advanced from ``src`` to ``dst``.
        """

    def fold(self, memory: Memory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Fold N logs, as a ``Fold``, in several layers at once: the memory has a leading dimension."""


def bind_folds(recurrences: Sequence[Recurrence[Any, Any] | None], stacks: Sequence[LayerStack]) -> tuple[Fold, ...]:
    """Return functions that fold the logs of all layers, one for each run of equal layers.

    Args:
        recurrences: per layer of the model.
    """
    folds = list[Fold]()
    for stack in stacks:
        start = 0
        for recurrence, group in groupby(recurrences[layer] for layer in stack.layers):
            end = start + len(list(group))
            if recurrence is not None:
                part = stack.part(start, end)
                folds.append(partial(recurrence.fold, recurrence.bind(part.states, part.log)))
            start = end
    return tuple(folds)
