"""Softmax attention to the latents of a few groups of tokens, which an index chooses for each query, in plain torch.

A *group* is ``group_tokens`` consecutive tokens, counted from the sequence's first. Every token keeps an index key and
gates, one per channel; the key of a group is the sum of its tokens' index keys, weighed by a softmax over their gates
plus a bias by index in the group. A query attends to the ``max_groups`` groups, among those that end at or before it,
with the greatest sums over index heads of ``weight * relu(index query * group key)``, and to the tokens after the last
of those groups, up to itself. Ties go to the earlier group; transformers leaves them to ``topk``, which may choose any.

Both operations are reference implementations, which also run on CPUs. The second gathers the latents of each query,
so that its memory and its time do not depend on the length of a context.

Invariants: those of ``attention.py``. A query's result does not depend on other queries of the step.

Source: ``transformers`` (its indexer with ``index_kpool``).

Shape suffixes: T tokens, H query heads, D channels of a latent, V those of its value, J index heads, C channels of an
index key, X those of an index key and then its gates, N groups, K chosen groups, G tokens of a group, L keys of a
sequence, S tokens that a query may attend to, M blocks of a sequence, B blocks, P tokens in a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention import attend_sequence, gathered, seen_span
from strandline.kernels.attention.indexed_attention import best_groups
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.operation import operation, triton

QUERY_TOKENS = 32
"""Queries that are computed together: bounds the memory of what is gathered for them."""


@dataclass(frozen=True, slots=True)
class PooledIndex:
    """How groups are made of tokens, and how many of them a query attends to."""

    group_tokens: int
    max_groups: int
    bias_GC: Tensor
    """Added to the gates of a group's tokens."""


def is_read_whole(num_tokens: int, group_tokens: int, max_groups: int) -> bool:
    """Return whether queries in a context of this length attend to all tokens up to themselves."""
    return num_tokens // group_tokens <= max_groups


@operation(triton("attention.indexed_attention_triton"))
def choose_groups(
    index_q_TJC: Tensor, weight_TJ: Tensor, index_BPX: Tensor, batch: AttentionBatch, index: PooledIndex
) -> Tensor:
    """Return the groups that each token attends to, ``group_TK``, int64, and -1 after them where they are fewer.

    The step's own index keys and gates must have been written before.
    """
    group_TK = torch.full((len(index_q_TJC), index.max_groups), -1, device=index_q_TJC.device)
    for i in range(len(batch.context_lens)):
        index_LX = gathered(index_BPX, batch.block_table_NM[i], seen_span(batch, i, None), index_q_TJC.dtype)
        key_NC = pooled_keys(index_LX, index).float()
        for rows, first in _parts(batch, i):
            num_groups = (first + rows.stop - rows.start) // index.group_tokens
            score_TJN = index_q_TJC[rows].float() @ key_NC[:num_groups].t()
            score_TN = score_TJN.relu_().mul_(weight_TJ[rows].float().unsqueeze(-1)).sum(dim=1)
            found_TK = best_groups(score_TN, first, index.group_tokens, index.max_groups)
            group_TK[rows, : found_TK.shape[1]] = found_TK
    return group_TK


def pooled_keys(index_LX: Tensor, index: PooledIndex) -> Tensor:
    """Return the keys ``key_NC`` of a sequence's complete groups, given its tokens' index keys and gates."""
    num_groups = len(index_LX) // index.group_tokens
    index_NGX = index_LX[: num_groups * index.group_tokens].unflatten(0, (num_groups, index.group_tokens))
    key_NGC, gate_NGC = index_NGX.chunk(2, dim=-1)
    weight_NGC = (gate_NGC.float() + index.bias_GC.float()).softmax(dim=1).to(index_LX.dtype)
    key_NC: Tensor = (weight_NGC * key_NGC).sum(dim=1)
    return key_NC


@operation(triton("attention.indexed_attention_triton", takes_launches=True))
def indexed_latent_attention(
    q_THD: Tensor,
    latent_BPD: Tensor,
    group_TK: Tensor,
    batch: AttentionBatch,
    group_tokens: int,
    value_dim: int,
    *,
    scale: float,
) -> Tensor:
    """Attend every token to the groups chosen for it; return ``out_THV``, which heads read of the latents' values.

    The step's own latents must have been written before.

    Args:
        group_TK: as ``choose_groups`` returns it; K is the most groups that a query attends to.
        value_dim: V, at most D.
    """
    out_THV = q_THD.new_empty(*q_THD.shape[:2], value_dim)
    for i, num_tokens in enumerate(batch.context_lens):
        if is_read_whole(num_tokens, group_tokens, group_TK.shape[1]):
            rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
            k_LD = gathered(latent_BPD, batch.block_table_NM[i], seen_span(batch, i, None), q_THD.dtype)
            k_L1D, out_T1HV = k_LD.unsqueeze(1), out_THV[rows].unsqueeze(1)
            attend_sequence(q_THD[rows].unsqueeze(1), k_L1D, k_L1D[..., :value_dim], out_T1HV, scale, None)
            continue
        for rows, first in _parts(batch, i):
            position_TS = seen_positions(group_TK[rows], first, group_tokens)
            is_seen_T11S = (position_TS >= 0)[:, None, None]
            position_TS = position_TS.clamp_(min=0)
            block_TS = batch.block_table_NM[i][position_TS // BLOCK_TOKENS]
            k_T1SD = latent_BPD[block_TS, position_TS % BLOCK_TOKENS].unsqueeze(1)
            # The heads of a query stand where queries of a sequence do: all see the same keys.
            out_T1HV = F.scaled_dot_product_attention(
                q_THD[rows].unsqueeze(1), k_T1SD, k_T1SD[..., :value_dim], attn_mask=is_seen_T11S, scale=scale
            )
            out_THV[rows] = out_T1HV.squeeze(1)
    return out_THV


def _parts(batch: AttentionBatch, sequence: int) -> Iterator[tuple[slice, int]]:
    """Yield the rows of a sequence's queries, some at a time, and the position of their first one."""
    start, stop = batch.query_starts[sequence : sequence + 2]
    for first_row in range(start, stop, QUERY_TOKENS):
        rows = slice(first_row, min(first_row + QUERY_TOKENS, stop))
        yield rows, batch.context_lens[sequence] - (stop - first_row)


def seen_positions(group_TK: Tensor, first: int, group_tokens: int) -> Tensor:
    """Return the positions of the tokens that each query attends to, ``position_TS``; -1 stands for none.

    Args:
        first: position of the first query; they are consecutive.
    """
    device = group_TK.device
    offset_G = torch.arange(group_tokens, device=device)
    chosen_TKG = group_TK.unsqueeze(-1) * group_tokens + offset_G
    chosen_TKG = chosen_TKG.masked_fill_((group_TK < 0).unsqueeze(-1), -1)
    position_T1 = first + torch.arange(len(group_TK), device=device).unsqueeze(-1)
    last_TG = (position_T1 + 1) // group_tokens * group_tokens + offset_G[:-1]
    return torch.cat((chosen_TKG.flatten(1), last_TG.masked_fill_(last_TG > position_T1, -1)), dim=1)


def indexed_latent_attention_reference(
    q_THD: Tensor,
    latent_TD: Tensor,
    index_q_TJC: Tensor,
    weight_TJ: Tensor,
    index_TX: Tensor,
    index: PooledIndex,
    value_dim: int,
    scale: float,
) -> Tensor:
    """Return ``out_THV`` of one whole sequence, query by query: far too slow, kept as the baseline."""
    out = []
    for t, q_HD in enumerate(q_THD):
        key_NC = pooled_keys(index_TX[: t + 1], index)
        score_N = weight_TJ[t] @ torch.einsum("jc,nc->jn", index_q_TJC[t], key_NC).relu()
        groups = score_N.argsort(descending=True, stable=True)[: index.max_groups].tolist()
        tokens = [group * index.group_tokens + i for group in groups for i in range(index.group_tokens)]
        tokens += range(len(key_NC) * index.group_tokens, t + 1)
        weight_HL = (q_HD @ latent_TD[tokens].t() * scale).softmax(-1)
        out.append(weight_HL @ latent_TD[tokens, :value_dim])
    return torch.stack(out)
