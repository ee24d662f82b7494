"""Softmax attention to a few groups of tokens, which an index chooses for each query, in plain torch.

A *group* is ``group_tokens`` consecutive tokens, counted from the sequence's first. Every token keeps an index key; the
key of a group is the mean of those of its tokens, normalised and rotated by the position of the first one. A query
attends to the ``max_groups`` groups, among those that end at or before it, with the greatest sums over index heads of
``relu(index query * group key)``, and to the tokens after the last of those groups, up to itself. Ties go to the
earlier group.

The reference implementation, which also runs on CPUs. Invariants: those of ``attention.py``.

Source: ``transformers`` (its ``QSAIndexer``).

Shape suffixes: T tokens, H query heads, G key/value heads, R query heads per key/value head, D head dim, J index heads,
C channels of an index key, N groups, K chosen groups, L keys of a sequence, M blocks of a sequence, B blocks, P tokens
in a block, F rotated pairs of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention import QUERY_TOKENS, attend_sequence, by_query_head, gathered, seen_span
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import operation, triton
from strandline.kernels.rowwise.norm import rms_norm_heads_zero_centered
from strandline.kernels.rowwise.rotary import apply_rotary, rotary_table, table_of_pairs


@dataclass(frozen=True, slots=True)
class GroupIndex:
    """How groups are made of tokens, and how many of them a query attends to."""

    group_tokens: int
    max_groups: int
    key_norm_C: Tensor
    """Weight of the zero-centred norm of a group's key."""
    eps: float
    inv_freq_F: Tensor
    dimension_F: Tensor
    """As in ``rotary.rotary_table_3d``."""
    attention_factor: float

    def is_whole(self, num_tokens: int) -> bool:
        """Return whether queries in a context of this length attend to all tokens up to themselves."""
        return num_tokens // self.group_tokens <= self.max_groups


@dataclass(frozen=True, slots=True)
class IndexedMemory:
    """One layer's share of all blocks: keys, values, and index keys as they are projected."""

    kv: KVMemory
    index_BPC: Tensor
    position_BP3: Tensor | None = None
    """Positions for rotary embeddings, float32: time, height and width; None: a token's position in its sequence."""


@operation(triton("attention.indexed_attention_triton", takes_launches=True))
def indexed_attention(
    q_THD: Tensor,
    index_q_TJC: Tensor,
    memory: IndexedMemory,
    batch: AttentionBatch,
    index: GroupIndex,
    *,
    scale: float,
) -> Tensor:
    """Attend every token to the groups of its sequence that its index queries choose; return ``out_THD``.

    The step's own keys, values and index keys must have been written before.

    Args:
        index_q_TJC: normalised and rotated.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_TGRD, out_TGRD = (x.unflatten(1, (memory.kv.k_BPGD.shape[2], -1)) for x in (q_THD, out_THD))
    for i, num_tokens in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        table_M, span = batch.block_table_NM[i], seen_span(batch, i, None)
        q_and_out = (q_TGRD[rows], out_TGRD[rows])
        if rows.stop - rows.start == 1 and not index.is_whole(num_tokens):
            _attend_one(*q_and_out, index_q_TJC[rows], memory, table_M, num_tokens, index, scale)
            continue
        k_LGD, v_LGD = (gathered(x, table_M, span, q_THD.dtype) for x in (memory.kv.k_BPGD, memory.kv.v_BPGD))
        if index.is_whole(num_tokens):
            attend_sequence(q_TGRD[rows], k_LGD, v_LGD, out_TGRD[rows], scale, None)
            continue
        key_NC = _stored_group_keys(memory, table_M, num_tokens, index)
        _attend_many(*q_and_out, index_q_TJC[rows], k_LGD, v_LGD, key_NC, index, scale)
    return out_THD


def _attend_one(
    q_1GRD: Tensor,
    out_1GRD: Tensor,
    index_q_1JC: Tensor,
    memory: IndexedMemory,
    table_M: Tensor,
    num_tokens: int,
    index: GroupIndex,
    scale: float,
) -> None:
    """Attend a sequence's last token, which reads the keys and values that it attends to alone."""
    key_NC = _stored_group_keys(memory, table_M, num_tokens, index)
    [seen_L] = seen_tokens(index_q_1JC, key_NC, num_tokens - 1, num_tokens, index)
    position_L = seen_L.nonzero().squeeze(-1)
    block_L, offset_L = table_M[position_L // BLOCK_TOKENS], position_L % BLOCK_TOKENS
    k_LGD, v_LGD = (x[block_L, offset_L] for x in (memory.kv.k_BPGD, memory.kv.v_BPGD))
    attend_sequence(q_1GRD, k_LGD, v_LGD, out_1GRD, scale, None)


def _attend_many(
    q_TGRD: Tensor,
    out_TGRD: Tensor,
    index_q_TJC: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    group_key_NC: Tensor,
    index: GroupIndex,
    scale: float,
) -> None:
    """Attend the last T of a sequence's L tokens, with all others masked that a query does not attend to."""
    num_keys, num_queries, heads_per_key = len(k_LGD), len(q_TGRD), q_TGRD.shape[2]
    k_GRLD, v_GRLD = (by_query_head(x, heads_per_key) for x in (k_LGD, v_LGD))
    q_GRTD, out_GRTD = q_TGRD.permute(1, 2, 0, 3), out_TGRD.permute(1, 2, 0, 3)
    for start in range(0, num_queries, QUERY_TOKENS):
        rows = slice(start, min(start + QUERY_TOKENS, num_queries))
        first, last = num_keys - num_queries + rows.start, num_keys - num_queries + rows.stop
        seen_TL = seen_tokens(index_q_TJC[rows], group_key_NC, first, last, index)
        out_GRTD[:, :, rows] = F.scaled_dot_product_attention(
            q_GRTD[:, :, rows], k_GRLD[:, :, :last], v_GRLD[:, :, :last], attn_mask=seen_TL, scale=scale
        )


def _stored_group_keys(memory: IndexedMemory, table_M: Tensor, num_tokens: int, index: GroupIndex) -> Tensor:
    """Return the keys of a sequence's complete groups."""
    blocks = table_M[: -(-num_tokens // BLOCK_TOKENS)]

    def stored(memory: Tensor) -> Tensor:
        return memory.index_select(0, blocks).flatten(0, 1)[:num_tokens]

    positions_BP3 = memory.position_BP3
    return group_keys(stored(memory.index_BPC), index, None if positions_BP3 is None else stored(positions_BP3))


def group_keys(key_LC: Tensor, index: GroupIndex, position_L3: Tensor | None = None) -> Tensor:
    """Return the keys ``group_key_NC`` of a sequence's complete groups, given its tokens' index keys.

    Args:
        position_L3: as stored; None: tokens are of text, and counted from 0.
    """
    num_groups = len(key_LC) // index.group_tokens
    by_group_NLC = key_LC[: num_groups * index.group_tokens].unflatten(0, (num_groups, index.group_tokens))
    key_NC = by_group_NLC.float().mean(dim=1).to(key_LC.dtype)
    normed_NC = rms_norm_heads_zero_centered(key_NC, index.key_norm_C, index.eps)
    if position_L3 is None:
        first_N = torch.arange(num_groups, device=key_LC.device) * index.group_tokens
        rotary = rotary_table.reference(first_N, index.inv_freq_F, index.attention_factor)
    else:
        first_3N = position_L3[:: index.group_tokens][:num_groups].T
        rotary = table_of_pairs(first_3N[index.dimension_F].T, index.inv_freq_F, index.attention_factor)
    return apply_rotary(normed_NC.unsqueeze(1), rotary).squeeze(1)


def seen_tokens(index_q_TJC: Tensor, group_key_NC: Tensor, first: int, end: int, index: GroupIndex) -> Tensor:
    """Return which of the tokens ``[0, end)`` each query attends to, ``seen_TL``.

    Args:
        first: position of the first query; they are consecutive, and the last one is ``end - 1``.
        group_key_NC: keys of all complete groups among these tokens, or of more.
    """
    group_tokens, num_groups = index.group_tokens, end // index.group_tokens
    device = index_q_TJC.device
    score_TJN = index_q_TJC.float() @ group_key_NC[:num_groups].float().t()
    chosen_TK = best_groups(score_TJN.relu_().sum(dim=1), first, group_tokens, index.max_groups)
    # The last column stands for no group.
    is_chosen_TN = torch.zeros(end - first, num_groups + 1, dtype=torch.bool, device=device)
    is_chosen_TN = is_chosen_TN.scatter_(1, chosen_TK % (num_groups + 1), True)[:, :-1]
    token_L, position_T1 = (torch.arange(start, end, device=device) for start in (0, first))
    position_T1 = position_T1.unsqueeze(-1)
    seen_TL = (token_L >= (position_T1 + 1) // group_tokens * group_tokens) & (token_L <= position_T1)
    seen_TL[:, : num_groups * group_tokens] |= is_chosen_TN.repeat_interleave(group_tokens, dim=1)
    return seen_TL


def best_groups(score_TN: Tensor, first: int, group_tokens: int, max_groups: int) -> Tensor:
    """Return the groups with the greatest scores, ``[T, min(N, max_groups)]``; -1 where fewer are complete.

    Args:
        score_TN: scores of the first N groups of a sequence; overwritten.
        first: position of the first query; they are consecutive. Groups that end after a query do not count.
    """
    num_queries, num_groups = score_TN.shape
    position_T1 = torch.arange(first, first + num_queries, device=score_TN.device).unsqueeze(-1)
    num_complete_T1 = (position_T1 + 1) // group_tokens
    score_TN.masked_fill_(torch.arange(num_groups, device=score_TN.device) >= num_complete_T1, -torch.inf)
    best_TK = score_TN.sort(dim=-1, descending=True, stable=True).indices[:, :max_groups]
    return best_TK.masked_fill(best_TK >= num_complete_T1, -1)


def indexed_attention_reference(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    index_q_TJC: Tensor,
    index_k_TC: Tensor,
    index: GroupIndex,
    scale: float,
) -> Tensor:
    """Return ``out_THD`` of one whole sequence, query by query: far too slow, kept as the baseline."""
    out, heads_per_key = [], q_THD.shape[1] // k_TGD.shape[1]
    for t, q_HD in enumerate(q_THD):
        key_NC = group_keys(index_k_TC[: t + 1], index)
        score_N = torch.einsum("jc,nc->jn", index_q_TJC[t], key_NC).relu().sum(0)
        groups = score_N.argsort(descending=True, stable=True)[: index.max_groups].tolist()
        tokens = [group * index.group_tokens + i for group in groups for i in range(index.group_tokens)]
        tokens += range(len(key_NC) * index.group_tokens, t + 1)
        k_HLD, v_HLD = (x[tokens].repeat_interleave(heads_per_key, dim=1).transpose(0, 1) for x in (k_TGD, v_TGD))
        weight_HL = (torch.einsum("hd,hld->hl", q_HD, k_HLD) * scale).softmax(-1)
        out.append(torch.einsum("hl,hld->hd", weight_HL, v_HLD))
    return torch.stack(out)
