"""What drafts tokens after a step for the next one, as the runner and its graphs call it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from strandline.kernels.batch import StepBatch
from strandline.kernels.sampling.verification import AcceptedDrafts, SampledSequences
from strandline.records.plan import SequencePlan

Drafts = dict[int, tuple[int, ...]]
"""Drafts for the next step, by index of the sequence in the plan."""


class StepRows(NamedTuple):
    """The sequences of a step, and the rows of their hidden states."""

    sequences: Sequence[SequencePlan]
    hidden_XE: Tensor
    first_rows: Mapping[int, int]
    """By index, the row of a sequence's first hidden state; of those that compute something."""
    stored_rows: Mapping[int, int]
    """By index, the row of the stored hidden state from which a sequence resumes."""


class Verified(NamedTuple):
    """A padded step whose drafts have been compared, within a graph."""

    batch: StepBatch
    block_table_NM: Tensor
    """The blocks of all sequences, the last filler included."""
    sampled: SampledSequences
    accepted: AcceptedDrafts
    hidden_TE: Tensor
    starts_N1: Tensor
    """The integers from 0 to the number of sequences without that filler."""


class StepDrafter(Protocol):
    """A drafter's part of every step."""

    keeps_pairs: bool
    """Whether what it stores of a token depends on the next one, too: of decodes, and of sequences that resume, whose
    stored hidden states it reads."""

    def keep_resumed(self, rows: StepRows) -> None:
        """Store what depends on the first tokens of sequences that resume. Does not wait for the device."""

    def keep(self, rows: StepRows) -> None:
        """Store what later drafts need of a step that makes none. Does not wait for the device."""

    def keep_decoded(self, batch: StepBatch, hidden_TE: Tensor) -> None:
        """Store what later drafts need of decodes, after their tokens have been sampled; captured in graphs."""

    def draft(self, rows: StepRows, sampled: Mapping[int, Sequence[int]]) -> Drafts:
        """Draft for the next step. Waits for the device.

        Args:
            sampled: by index, tokens that were sampled after the certain ones.
        """

    def draft_verified(self, verified: Verified, num_drafts: int) -> Tensor:
        """Return drafts after each sequence's last token that counts, ``[N, num_drafts]``; captured in graphs."""
