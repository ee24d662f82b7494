"""The tensors of one step that every layer shares, and an attention layer's memory.

Shape suffixes: T tokens of the step, N sequences, M blocks per table, B blocks, P tokens in a block (64), G key/value
heads, D channels of a head; Q logged tokens, K drafts.

The sequences of a step are ordered: first the *decodes* (one token each, no cut), whose tokens are rows
``[0, num_decodes)``; then the *prefills* (one token or more), whose tokens are the rows after. Tensors live on the
device of the model; tuples are host copies for the kernels that loop over sequences on the host.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strandline.kernels.chunk_table import ChunkTable


@dataclass(frozen=True, slots=True)
class KVMemory:
    """One attention layer's share of all blocks: strided views into the arena.

    In e4m3 a number is stored divided by its scale and rounded; beyond 448 scales it is stored as the largest. Kernels
    compute with what is stored, in the dtype of the queries, and multiply scores and results by the scales.
    """

    k_BPGD: Tensor
    v_BPGD: Tensor
    k_scale: float = 1.0
    """1 in other dtypes than e4m3."""
    v_scale: float = 1.0


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
    """Per row, the block that takes its keys and values; the null block where a shared one has them already."""
    write_offsets_T: Tensor
    is_all_written: bool
    """Whether no row's block is the null block."""
    most_rows: int | None = None
    """Of a prefill, where each has a few alone: the certain token of a sequence, and its drafts."""
    gathers: dict[Hashable, Any] = field(default_factory=dict)
    """What one layer has worked out of the tables above, on a CPU, and every layer like it takes again."""


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The decodes' logs (contract 4), and how much of each the step folds: the plan decides, backends follow it."""

    log_N: Tensor
    """int64; the null log is empty, and stays so."""
    len_N: Tensor
    """int64 tokens in each log before the step."""
    rows: slice | Tensor
    """``log_N`` again; a slice where it counts up, so that nothing is copied."""
    lens: tuple[int, ...]
    """``len_N`` on the host."""
    num_folded_N: Tensor
    """int64 tokens that the step folds into ``dst``: 0, and its token is appended to the log; or all, log and token."""
    num_folded: tuple[int, ...]
    """``num_folded_N`` on the host."""


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The logged tokens that recurrent layers compute again before the step's own (``kernels/replay.py``).

    T counts the tokens of the step's prefills here.
    """

    num_rows: int
    """Logged tokens and the step's own together."""
    step_rows_T: Tensor
    """int64 places of the step's rows among all."""
    logged_rows_Q: Tensor
    """int64 places of the logged tokens among all."""
    logged_places_Q: Tensor
    """int64 rows of the layers' logs where their inputs are."""
    draft_rows_K: Tensor
    """int64 rows of the step that are drafts."""
    draft_places_K: Tensor
    """int64 rows of the layers' logs that take the drafts' inputs."""
    insert_logged: Callable[..., tuple[Tensor, ...]] = field(kw_only=True)
    """The operation of that name, as it is bound."""
    is_padded: bool = field(default=False, kw_only=True)
    """Whether the last of all rows is of no token: rows that pad the step are copied there, and get zeros."""
    derived: dict[Hashable, Any] = field(default_factory=dict, kw_only=True)
    """What one layer has worked out of the tables above, and every layer like it takes again."""


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """Where the sequences' states come from and go to (contract 3): read ``src``, write ``dst``."""

    src_N: Tensor
    """int64 slots; the null slot means a fresh state: zeros, and a window of zeros."""
    dst_N: Tensor
    chunks: ChunkTable
    """Of the prefills only; rows count from the first prefill token."""
    log: LogBatch | None = None
    """Of the decodes only; None: no sequence keeps a log."""
    replay: ReplayBatch | None = None
    """Of the prefills only, whose chunks then count the rows of both; None: nothing is logged."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything a model's forward pass needs to know about the step."""

    token_ids_T: Tensor
    positions_T: Tensor
    num_decodes: int
    """Sequences that decode, the first ones."""
    num_decode_rows: int
    """Their rows, the first ones: as many, as long as every sequence decodes one token in a step."""
    attention: AttentionBatch
    recurrent: RecurrentBatch
