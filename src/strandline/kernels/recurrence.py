"""What a linear recurrence offers to layers and to the runner, whatever its mathematics.

Its *states* lie in slots, by name; slot 0 reads as zeros and is never written. What a decoded token adds may wait in a
*log* (contract 4): the sequence's states are then those in its slot, advanced over the log. To *fold* is to bring them
up to date in the slot.

Recurrences are values: those that compare equal do the same, so that equal layers are folded together.

Shape suffixes: N sequences; J slots or logs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

from torch import Tensor

from strandline.kernels.arena import LayerStack
from strandline.kernels.batch import LogBatch
from strandline.kernels.chunk_table import ChunkTable
from strandline.specs import LogSpec, TensorSpec

Inputs = TypeVar("Inputs", contravariant=True)
Memory = TypeVar("Memory")

Fold = Callable[[Tensor, Tensor, Tensor], None]
"""Folds the logs ``log_N``, each of ``len_N`` tokens (1 at least), into the states in the slots ``slot_N``."""


class Recurrence(Protocol[Inputs, Memory]):
    """A linear recurrence of one size.

    ``Inputs`` are the tensors of some tokens that it works on; ``Memory`` is what its kernels take of a layer's memory.
    """

    @property
    def states(self) -> tuple[TensorSpec, ...]:
        """What it keeps of a sequence."""

    @property
    def log(self) -> LogSpec | None:
        """What it keeps of tokens that are not folded yet; None: it keeps no log."""

    def bind(self, states: Mapping[str, Tensor], log: Mapping[str, Tensor] | None) -> Memory:
        """Return what the kernels take, given the tensors by name; of several layers if each has a dimension more."""

    def prefill(self, inputs: Inputs, memory: Memory, src_N: Tensor, dst_N: Tensor, chunks: ChunkTable) -> Tensor:
        """Run over the new tokens of N sequences; return the output of every token.

        Reads each sequence's states from slot ``src``, writes those after its last token to slot ``dst``, and those
        after each chunk with a cut to the cut's slot.
        """

    def decode(self, inputs: Inputs, memory: Memory, src_N: Tensor, dst_N: Tensor, log: LogBatch | None) -> Tensor:
        """Advance N sequences by one token each; return the outputs.

        Args:
            log: where the tokens are appended or folded; None: the states go from ``src`` to ``dst``.
        """

    def fold(self, memory: Memory, slot_N: Tensor, log_N: Tensor, len_N: Tensor) -> None:
        """Fold N logs, as a ``Fold``, in several layers at once: the memory has one dimension more."""


def bind_folds(recurrences: Sequence[Recurrence[Any, Any] | None], stacks: Sequence[LayerStack]) -> tuple[Fold, ...]:
    """Return what folds the logs of all layers: one function for each run of equal layers.

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
