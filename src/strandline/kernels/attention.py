"""Softmax attention over keys and values that lie in blocks, in plain torch.

This module is the definition of right and the path that serves on a CPU without Numba. Sequences of a step are
ordered as in ``batch.py``: decodes are attended together, in groups of similar length; prefills one by one.

Invariants: what a sequence does not own never reaches its result, NaN included: neither other blocks, nor the
rows of its last block past its context, nor the null block.

Shape suffixes: T tokens, N sequences, M blocks of a sequence, L keys of a sequence, B blocks, P tokens in a block,
G key/value heads, R query heads per key/value head, H = G R query heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.platform import has_twins

GROUP_BYTES = 2**20
"""Most bytes of keys that a group of decodes gathers at once: few enough to be attended while still in cache."""

GROUP_SPREAD_BLOCKS = 4
"""A group's longest sequence has at most this many blocks, and a quarter, more than its shortest."""

QUERY_TOKENS = 256
"""Queries of a prefill that are masked together: bounds the mask of a prompt of any length."""


@has_twins(triton="attention_triton", numba="attention_numba")
def paged_attention(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
) -> Tensor:
    """Attend every token to its sequence's tokens up to itself; return ``out_THD``.

    The step's own keys and values must have been written before.

    Args:
        num_decodes: how many sequences, from the first, have one token each.
        window_tokens: a token sees itself and the ``window_tokens - 1`` tokens before it; None: all before it.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_TGRD, out_TGRD = (x.unflatten(1, (memory.k_BPGD.shape[2], -1)) for x in (q_THD, out_THD))
    kind = (window_tokens, num_decodes, memory.k_BPGD.dtype, memory.k_BPGD[0].nbytes)
    if kind not in batch.gathers:
        batch.gathers[kind] = _plan_gathers(batch, *kind)
    for gather in batch.gathers[kind]:
        out_TGRD[gather.rows] = _attend_decodes(q_TGRD[gather.rows], memory, gather, scale)
    for rows, k_LGD, v_LGD in gathered_prefills(memory, batch, num_decodes, window_tokens):
        attend_prefill(q_TGRD[rows], k_LGD, v_LGD, out_TGRD[rows], scale, window_tokens)
    return out_THD


def gathered_prefills(
    memory: KVMemory, batch: AttentionBatch, num_decodes: int, window_tokens: int | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows of each sequence behind the decodes, and ``k_LGD`` and ``v_LGD`` of what they see."""
    for i in range(num_decodes, len(batch.context_lens)):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        yield rows, *_gather_sequence(memory, batch.block_table_NM[i], seen_span(batch, i, window_tokens))


@dataclass(frozen=True, slots=True)
class Span:
    """The positions ``[start, end)`` of a sequence that some query of the step sees."""

    start: int
    end: int

    @property
    def first_block(self) -> int:
        return self.start // BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        return -(-self.end // BLOCK_TOKENS) - self.first_block

    @property
    def rows(self) -> tuple[int, int]:
        """The same range, counted from the start of the first block."""
        offset = self.first_block * BLOCK_TOKENS
        return self.start - offset, self.end - offset


@dataclass(frozen=True, slots=True)
class _Gather:
    """Which keys and values a group of N decodes needs: of all blocks named, some rows, or all that are not hidden."""

    rows: slice | Tensor
    """Of the step."""
    block_X: Tensor
    """Sequence after sequence, padded to the longest: ``X = N M``."""
    keys: slice
    """Of the rows of each sequence's blocks."""
    hidden_Y: Tensor | None
    """Rows of all blocks that are not their sequence's own; None: there are none between ``keys``."""
    mask_N11L: Tensor | None
    """Added to the scores; None when every key of every sequence is seen."""


def _plan_gathers(
    batch: AttentionBatch, window_tokens: int | None, num_decodes: int, dtype: torch.dtype, block_bytes: int
) -> list[_Gather]:
    """Return what is gathered for each group of decodes."""
    spans = [seen_span(batch, i, window_tokens) for i in range(num_decodes)]
    groups = _groups([span.num_blocks for span in spans], GROUP_BYTES // (block_bytes or 1))
    return [_gather(batch, [spans[i] for i in group], group, dtype) for group in groups]


def seen_span(batch: AttentionBatch, sequence: int, window_tokens: int | None) -> Span:
    """Return the positions that a sequence's queries of the step see."""
    end = batch.context_lens[sequence]
    first_query = end - (batch.query_starts[sequence + 1] - batch.query_starts[sequence])
    return Span(0 if window_tokens is None else max(0, first_query - window_tokens + 1), end)


def _groups(num_blocks: Sequence[int], max_blocks: int) -> Iterator[list[int]]:
    """Split sequences into groups that are gathered together: similar in length, not too large."""
    group: list[int] = []
    for i in sorted(range(len(num_blocks)), key=num_blocks.__getitem__):
        if group:
            shortest = num_blocks[group[0]]
            is_longer = num_blocks[i] > shortest + shortest // 4 + GROUP_SPREAD_BLOCKS
            if is_longer or (len(group) + 1) * num_blocks[i] > max_blocks:
                yield group
                group = []
        group.append(i)
    if group:
        yield group


def _rows(group: list[int], device: torch.device) -> slice | Tensor:
    """Return the rows of a group of decodes, as a slice where they lie together."""
    first, last = group[0], group[-1]
    if group == list(range(first, last + 1)):
        return slice(first, last + 1)
    return torch.tensor(group, device=device)


def _gather(batch: AttentionBatch, spans: list[Span], group: list[int], dtype: torch.dtype) -> _Gather:
    """Plan to gather keys and values of a group, padded to its longest; what is not a sequence's own is hidden."""
    device = batch.block_table_NM.device
    rows = _rows(group, device)
    num_blocks = max(span.num_blocks for span in spans)
    block_X = _group_table(batch.block_table_NM[rows], spans, num_blocks).flatten()
    start, end = spans[0].rows
    if all(span.rows == (start, end) for span in spans):
        return _Gather(rows, block_X, slice(start, end), None, None)
    bounds_N2 = torch.tensor([span.rows for span in spans], device=device)
    row_L = torch.arange(num_blocks * BLOCK_TOKENS, device=device)
    hidden_NL = (row_L < bounds_N2[:, :1]) | (row_L >= bounds_N2[:, 1:])
    mask_NL = torch.zeros(hidden_NL.shape, dtype=dtype, device=device).masked_fill_(hidden_NL, -torch.inf)
    return _Gather(rows, block_X, slice(None), hidden_NL.flatten().nonzero().squeeze(-1), mask_NL[:, None, None])


def _group_table(table_NM: Tensor, spans: list[Span], num_blocks: int) -> Tensor:
    """Return the blocks of each sequence's span; where it has fewer than ``num_blocks``, any block follows."""
    if not any(span.first_block for span in spans):
        return table_NM[:, :num_blocks]
    first_N1 = torch.tensor([[span.first_block] for span in spans], device=table_NM.device)
    column_NM = first_N1 + torch.arange(num_blocks, device=table_NM.device)
    return table_NM.gather(1, column_NM.clamp_max(table_NM.shape[1] - 1))


def _attend_decodes(q_NGRD: Tensor, memory: KVMemory, gather: _Gather, scale: float) -> Tensor:
    """Attend one query token per sequence; the query heads of a key/value head stand where queries usually do."""
    k_NGLD, v_NGLD = (_gather_group(blocks, gather, len(q_NGRD)) for blocks in (memory.k_BPGD, memory.v_BPGD))
    return F.scaled_dot_product_attention(q_NGRD, k_NGLD, v_NGLD, attn_mask=gather.mask_N11L, scale=scale)


def _gather_group(blocks_BPGD: Tensor, gather: _Gather, num_sequences: int) -> Tensor:
    """Return a group's keys or values; what is hidden is zero."""
    gathered_NLGD = blocks_BPGD.index_select(0, gather.block_X).view(num_sequences, -1, *blocks_BPGD.shape[2:])
    if gather.hidden_Y is not None:
        gathered_NLGD.flatten(0, 1).index_fill_(0, gather.hidden_Y, 0)
    return gathered_NLGD[:, gather.keys].transpose(1, 2)


def _gather_sequence(memory: KVMemory, table_M: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """Return ``k_LGD`` and ``v_LGD`` of one sequence's span, and nothing around it."""
    start, end = span.rows
    blocks_M = table_M[span.first_block : span.first_block + span.num_blocks]
    return (
        memory.k_BPGD.index_select(0, blocks_M).flatten(0, 1)[start:end],
        memory.v_BPGD.index_select(0, blocks_M).flatten(0, 1)[start:end],
    )


def attend_prefill(
    q_TGRD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
) -> None:
    """Attend the last T of a sequence's L tokens, each to those up to itself, into ``out_TGRD``."""
    num_queries, num_keys = len(q_TGRD), len(k_LGD)
    offset = num_keys - num_queries
    heads_per_key = q_TGRD.shape[2]
    k_GRLD, v_GRLD = (x.transpose(0, 1).unsqueeze(1).expand(-1, heads_per_key, -1, -1) for x in (k_LGD, v_LGD))
    q_GRTD, out_GRTD = q_TGRD.permute(1, 2, 0, 3), out_TGRD.permute(1, 2, 0, 3)
    if offset == 0 and (window_tokens is None or num_keys <= window_tokens):
        out_GRTD.copy_(F.scaled_dot_product_attention(q_GRTD, k_GRLD, v_GRLD, is_causal=True, scale=scale))
        return
    for start in range(0, num_queries, QUERY_TOKENS):
        end = min(start + QUERY_TOKENS, num_queries)
        first = 0 if window_tokens is None else max(0, offset + start - window_tokens + 1)
        last = offset + end
        mask_TL = _mask((offset + start, last), (first, last), window_tokens, q_TGRD)
        out_GRTD[:, :, start:end] = F.scaled_dot_product_attention(
            q_GRTD[:, :, start:end], k_GRLD[:, :, first:last], v_GRLD[:, :, first:last], attn_mask=mask_TL, scale=scale
        )


def _mask(queries: tuple[int, int], keys: tuple[int, int], window_tokens: int | None, like: Tensor) -> Tensor:
    """Return what is added to the scores of queries against keys at these positions: 0 or minus infinity."""
    query_T1 = torch.arange(*queries, device=like.device).unsqueeze(-1)
    key_L = torch.arange(*keys, device=like.device)
    hidden_TL = key_L > query_T1
    if window_tokens is not None:
        hidden_TL |= key_L <= query_T1 - window_tokens
    return torch.zeros(hidden_TL.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_TL, -torch.inf)
