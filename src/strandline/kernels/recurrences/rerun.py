"""Logged tokens are computed again, before the step's own, by the same kernels: how drafts cost no slot (contract 4).

A sequence that speculates has a committed state, and a log of the drafts accepted since: of each token and layer the
*inputs* that the states are computed from. A step runs the prefill kernels from the committed state over the logged
tokens and then over its own. The state after the last token that is certain goes to the sequence's slot in passing, as
a cut; what comes after drafts is written nowhere. The inputs of the step's drafts replace the log.

So rejected drafts leave no trace: the log ends before them, and the next step overwrites them.

Shape suffixes: T rows of the step's prefills, R the same and those rerun, J entries of all logs; X stands for the
further dimensions of any tensor.
"""

from collections.abc import Callable

from torch import Tensor

from strandline.kernels.arena import LayerMemory
from strandline.kernels.batch import RerunBatch, StepBatch
from strandline.kernels.operation import operation, triton

Rerun = Callable[[StepBatch], None]
"""Advances a layer's states over logged tokens alone; the batch has no rows of its own."""

DraftLog = tuple[Tensor, ...] | None
"""The inputs of a layer's drafts, in the order of its spec; None: there are no drafts."""


def draft_log(memory: LayerMemory) -> DraftLog:
    """Return a layer's log of drafts."""
    return None if memory.draft_log is None else tuple(memory.draft_log.values())


def with_logged(rerun: RerunBatch | None, log: DraftLog, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the logged inputs and the step's own; then log those of the step's drafts.

    Args:
        rerun: None: nothing is logged, and the inputs come back.
        inputs: inputs of the step's prefills, ``[T, X]`` each, in the order of the log.
    """
    return inputs if rerun is None or log is None else rerun.insert_logged(rerun, log, inputs)


@operation(triton("recurrences.rerun_triton"))
def insert_logged(rerun: RerunBatch, log: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the logged inputs and the step's own, ``[R, X]`` each; then log those of the step's drafts.

    Args:
        log: ``[J, X]`` each.
        inputs: ``[T, X]`` each.
    """
    return tuple(_with_logged(rerun, log_JX, inputs_TX) for log_JX, inputs_TX in zip(log, inputs, strict=True))


def _with_logged(rerun: RerunBatch, log_JX: Tensor, inputs_TX: Tensor) -> Tensor:
    inputs_RX = inputs_TX.new_empty(rerun.num_rows, *inputs_TX.shape[1:])
    inputs_RX.index_copy_(0, rerun.step_rows_T, inputs_TX)
    if len(rerun.logged_rows_Q):
        inputs_RX.index_copy_(0, rerun.logged_rows_Q, log_JX.index_select(0, rerun.logged_entries_Q))
    if len(rerun.draft_rows_K):
        log_JX.index_copy_(0, rerun.draft_entries_K, inputs_TX.index_select(0, rerun.draft_rows_K))
    return inputs_RX


def of_step(rerun: RerunBatch | None, out_RX: Tensor) -> Tensor:
    """Return what was computed of the step's own tokens; may overwrite the row of no token."""
    if rerun is None:
        return out_RX
    if rerun.is_padded:
        out_RX[-1].zero_()
    return out_RX.index_select(0, rerun.step_rows_T)
