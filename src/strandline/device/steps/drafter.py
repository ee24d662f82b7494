"""What drafts tokens after a step for the next one, as the runner and its graphs call it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.kernels.sampling.verification import AcceptedDrafts
from strandline.kernels.step import PlannedStep
from strandline.records.plan import SequencePlan


class StepRows(NamedTuple):
    """The sequences of a step, the rows of their hidden states, and the tokens after these."""

    sequences: Sequence[SequencePlan]
    hidden_XE: Tensor
    first_rows: Mapping[int, int]
    """By index, the row of a sequence's first hidden state; of those that compute something, and none of a step whose
    graph calls the drafter for computed rows."""
    stored_rows: Mapping[int, int]
    """By index, the row of the stored hidden state from which a sequence resumes."""
    sampled: Mapping[int, Sequence[int]] | None
    """By index, tokens that were sampled after the certain ones; None: they are on the device, one of each sequence
    that is sampled."""


class NextDrafts(NamedTuple):
    """Drafts for the next step, on the device, or on the host once the device is done."""

    rows: Mapping[int, int]
    """The row of each sequence, by index in the plan."""
    tokens_ND: Tensor
    """More than a sequence wants, or ``NO_TOKEN``, may be in a row."""


class Verified(NamedTuple):
    """A padded step whose drafts have been compared, within a graph."""

    batch: StepBatch
    block_table_NM: Tensor
    """The blocks of all sequences, the last filler included."""
    sampled: PlannedStep
    accepted: AcceptedDrafts
    hidden_TE: Tensor
    starts_N1: Tensor
    """The integers from 0 to the number of sequences without that filler."""


class StepDrafter(Protocol):
    """A drafter's part of every step."""

    keeps_pairs: bool
    """Whether what it stores of a token depends on the next one, too: of decodes, and of sequences that resume, whose
    stored hidden states it reads."""

    def follow(self, rows: StepRows) -> NextDrafts | None:
        """Store what later drafts need of a step, and draft for the next one; None: no sequence wants drafts.

        Does not wait for the device.
        """

    def keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Store what later drafts need of decodes, after their tokens have been sampled; captured in graphs."""

    def draft_verified(self, verified: Verified, num_drafts: int) -> Tensor:
        """Return drafts after each sequence's last token that counts, ``[N, num_drafts]``; captured in graphs."""
