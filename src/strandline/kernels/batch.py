"""The tensors of one step that every layer shares, and an attention layer's memory.

Shape suffixes: T tokens of the step, N sequences, M blocks per table, B blocks, P tokens in a block (64), G key/value
heads, H query heads, D channels of a head; Q logged tokens, K drafts, R the rows of the step's prefills and those of
logged tokens.

The sequences of a step are ordered: first the *decodes* (one token each, no cut), whose tokens are rows
``[0, num_decodes)``; then the *prefills* (one token or more), whose tokens are the rows after. Tensors live on the
device of the model; tuples are host copies for the kernels that loop over sequences on the host.

A padded step that verifies drafts and computes prompts has no decodes. Its first prefills verify, and are computed by
themselves (``AttentionBatch.parts``, ``StepBatch.parts``): kernels for a few tokens are not those for prompts.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from strandline.ids import PATH, Lifetime
from strandline.kernels.chunk_table import ChunkTable


@dataclass(frozen=True, slots=True)
class KVMemory:
    """One attention layer's share of all blocks: strided views into the arena.

    In e4m3, values are divided by their scale, rounded, and clamped to ±448. Kernels compute with the stored values, in
    the dtype of the queries, and multiply scores and results by the scales.
    """

    k_BPGD: Tensor
    v_BPGD: Tensor
    k_scale: float = 1.0
    """1 unless the dtype is e4m3."""
    v_scale: float = 1.0
    sinks_H: Tensor | None = None
    """A score of each query head, float32, that its softmax has besides those of keys; no value belongs to it. None:
    there are none."""
    lifetime: Lifetime = PATH
    """Which blocks these are."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which tokens attend to which blocks, and where the step's own keys and values go."""

    query_starts: tuple[int, ...]
    """N + 1 row offsets of the sequences in ``[0, T]``."""
    context_lens: tuple[int, ...]
    """Per sequence, tokens in its context at the end of the step (its own new tokens included)."""
    query_starts_N1: Tensor
    context_lens_N: Tensor
    block_table_NM: Tensor
    """int32; entries past a sequence's context are the null block."""
    write_blocks_T: Tensor
    """Per row, the block to write keys and values to; the null block if a shared block already has them."""
    write_offsets_T: Tensor
    is_all_written: bool
    """Whether no row's block is the null block."""
    most_rows: int | None = None
    """Maximum rows of a prefill, if all are short: a sequence's certain token and its drafts."""
    is_padded: bool = False
    """Whether ``query_starts`` and ``context_lens`` say how much room there is, and the tensors what is in it."""
    gathers: dict[Hashable, Any] = field(default_factory=dict)
    """Values derived from the tables above on a CPU, computed by one layer and reused by others."""
    parts: "tuple[AttentionBatch, ...]" = ()
    """Sequences that verify drafts, and prompts: kernels may attend to each part by itself. Empty: there are not both.

    Their rows and sequences follow each other, and are counted in each part from 0.
    """
    windowed: "tuple[AttentionBatch, ...]" = ()
    """The same step in window blocks of each size; empty: layers with windows use the same blocks as the others."""

    def of(self, lifetime: Lifetime) -> "AttentionBatch":
        """Return the step as a layer takes it, given the blocks that hold its streams."""
        return self.windowed[lifetime - 1] if self.windowed and lifetime != PATH else self

    @property
    def has_lengths(self) -> bool:
        """Whether ``context_lens`` are the sequences' lengths, and not those that a CUDA graph is planned for."""
        return not self.is_padded and self.most_rows is None


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The decodes' logs (contract 4), and the number of tokens that the step folds, as planned by the scheduler."""

    log_N: Tensor
    """int64; the null log is always empty."""
    len_N: Tensor
    """int64 tokens in each log before the step."""
    rows: slice | Tensor
    """``log_N``, as a slice if its ids are consecutive, to avoid a copy."""
    lens: tuple[int, ...]
    """``len_N`` on the host."""
    num_folded_N: Tensor
    """int64 tokens that the step folds into ``dst``: 0 (the token is appended to the log), or all of log and token."""
    num_folded: tuple[int, ...]
    """``num_folded_N`` on the host."""


@dataclass(frozen=True, slots=True)
class RerunBatch:
    """The logged tokens that recurrent layers compute again before the step's own (``kernels/recurrences/rerun.py``).

    T counts the tokens of the step's prefills here.
    """

    num_rows: int
    """Logged tokens and the step's own together."""
    step_rows_T: Tensor
    """int64 indices of the step's rows among all."""
    logged_rows_Q: Tensor
    """int64 indices of the logged tokens among all."""
    logged_entries_Q: Tensor
    """int64 entries of the layers' logs that hold their inputs."""
    draft_rows_K: Tensor
    """int64 rows of the step that are drafts."""
    draft_entries_K: Tensor
    """int64 entries of the layers' logs that take the drafts' inputs."""
    insert_logged: Callable[..., tuple[Tensor, ...]] = field(kw_only=True)
    """The bound operation of that name."""
    is_padded: bool = field(default=False, kw_only=True)
    """Whether the last row belongs to no token: padding rows of the step are copied there, and get zeros."""
    source_R: Tensor | None = field(default=None, kw_only=True)
    """int64 row of the step that each row is, or ``-1 - entry`` of a logged one; None: follows from the tables above.
    Rows in no chunk may have any value here and in ``entry_R``."""
    entry_R: Tensor | None = field(default=None, kw_only=True)
    """int64 entry of the layers' logs that takes each row's inputs; -1: none does."""
    derived: dict[Hashable, Any] = field(default_factory=dict, kw_only=True)
    """Values derived from the tables above, computed by one layer and reused by others."""


class Slots(NamedTuple):
    """Slots of the states of N sequences (contract 3): each state is read from ``src`` and written to ``dst``."""

    src_N: Tensor
    """int64 slots; several sequences may share one. The null slot means a fresh state: zeros."""
    dst_N: Tensor
    """int64 slots, each distinct or null; may equal ``src_N``. The null slot drops the state."""


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """Slots of the sequences' states (contract 3): read ``src``, write ``dst``."""

    src_N: Tensor
    """int64 slots; the null slot means a fresh state: zeros, and a window of zeros."""
    dst_N: Tensor
    chunks: ChunkTable
    """Chunks of the prefills; rows count from the first prefill token."""
    log: LogBatch | None = None
    """Logs of the decodes; None: no sequence keeps a log."""
    rerun: RerunBatch | None = None
    """Logged tokens of the prefills, whose chunks then include them; None: there are none."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All inputs of a model's forward pass that describe the step."""

    token_ids_T: Tensor
    positions_T: Tensor
    num_decodes: int
    """Number of decoding sequences, which come first."""
    num_decode_rows: int
    """Number of their rows, which come first: one per sequence."""
    attention: AttentionBatch
    recurrent: RecurrentBatch
    rotary: Tensor | None = None
    """int64 ``[T]``, positions for rotary embeddings; None: ``positions_T``."""
    picture_offsets: Tensor | None = None
    """int64 ``[3, T]``, contiguous: what time, height and width add to ``rotary``. ``token_ids_T`` may then have ids of
    pictures' tokens: ``FIRST_VIRTUAL_ID`` plus a row of ``ModelMemory.pictures``. None: all rows are of text."""
    verified: RecurrentBatch | None = None
    """The first prefills, if they verify drafts and others follow, which alone are in ``recurrent`` then."""
    num_verified_rows: int = 0

    @property
    def parts(self) -> "tuple[StepBatch, StepBatch] | None":
        """Batches that layers with states compute one after the other; all but ``recurrent`` is the whole step's."""
        if self.verified is None:
            return None
        return replace(self, recurrent=self.verified, verified=None), replace(self, verified=None)

    @property
    def decode_slots(self) -> Slots:
        """Slots of the decodes' states."""
        return Slots(self.recurrent.src_N[: self.num_decodes], self.recurrent.dst_N[: self.num_decodes])

    @property
    def prefill_slots(self) -> Slots:
        """Slots of the prefills' states."""
        return Slots(self.recurrent.src_N[self.num_decodes :], self.recurrent.dst_N[self.num_decodes :])
