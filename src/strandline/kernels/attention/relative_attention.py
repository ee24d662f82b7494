"""Softmax attention whose scores depend on the distance between query and key as each query says, in plain torch.

A query mixes *profiles*, numbers for each distance, into one profile: what is added to its scores of keys at these
distances. Keys further away get nothing added.

The reference implementation, which also runs on CPUs. Invariants: those of ``attention.py``.

Source: ``transformers`` (``inkling``, its relative logits).

Shape suffixes: T tokens, H query heads, G key/value heads, R query heads per key/value head, D head dim, C profiles, X
distances, L keys.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.attention.attention import QUERY_TOKENS, by_query_head, gathered_sequences
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import operation, triton

MAX_SCORES: Final = 2**26
"""Scores of all heads that are computed together, but for those of one query."""


class RelativeScores(NamedTuple):
    """What is added to scores after they have been scaled."""

    mix_THC: Tensor
    """Factors of the profiles, whose sum is added."""
    profiles_CX: Tensor
    """The first column is for a token's score of itself."""


@operation(triton("attention.attention_triton", takes_launches=True))
def relative_attention(
    q_THD: Tensor,
    relative: RelativeScores,
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
    mix_THC, profiles_CX = relative
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_TGRD, mix_TGRC, out_TGRD = (x.unflatten(1, (memory.k_BPGD.shape[2], -1)) for x in (q_THD, mix_THC, out_THD))
    scale *= memory.k_scale
    for rows, k_LGD, v_LGD in gathered_sequences(memory, batch, 0, window_tokens, q_THD.dtype):
        queries = (q_TGRD[rows], mix_TGRC[rows], profiles_CX)
        _attend_sequence(*queries, k_LGD, v_LGD, out_TGRD[rows], scale, window_tokens)
    return out_THD if memory.v_scale == 1 else out_THD.mul_(memory.v_scale)


def _attend_sequence(
    q_TGRD: Tensor,
    mix_TGRC: Tensor,
    profiles_CX: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
) -> None:
    """Attend the last T of a sequence's L tokens, each to those up to itself, into ``out_TGRD``."""
    num_queries, num_heads, heads_per_key = q_TGRD.shape[:3]
    before = len(k_LGD) - num_queries
    k_GRLD, v_GRLD = (by_query_head(x, heads_per_key) for x in (k_LGD, v_LGD))
    q_GRTD, mix_GRTC, out_GRTD = (x.permute(1, 2, 0, 3) for x in (q_TGRD, mix_TGRC, out_TGRD))
    num_rows = max(1, min(QUERY_TOKENS, MAX_SCORES // (num_heads * heads_per_key * len(k_LGD))))
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        first = 0 if window_tokens is None else max(0, before + start - window_tokens + 1)
        keys = slice(first, before + rows.stop)
        profile_GRTX = mix_GRTC[:, :, rows] @ profiles_CX
        added_GRTL = _added(profile_GRTX, (before + start, keys.stop), (keys.start, keys.stop), window_tokens)
        out_GRTD[:, :, rows] = F.scaled_dot_product_attention(
            q_GRTD[:, :, rows], k_GRLD[:, :, keys], v_GRLD[:, :, keys], attn_mask=added_GRTL, scale=scale
        )


def _added(profile_GRTX: Tensor, queries: tuple[int, int], keys: tuple[int, int], window_tokens: int | None) -> Tensor:
    """Return what is added to the scores of queries against keys at these positions; minus infinity hides a key."""
    device, num_distances = profile_GRTX.device, profile_GRTX.shape[-1]
    distance_TL = torch.arange(*queries, device=device).unsqueeze(-1) - torch.arange(*keys, device=device)
    place_TL = distance_TL.clamp(0, num_distances - 1)
    added_GRTL = profile_GRTX.gather(-1, place_TL.expand(*profile_GRTX.shape[:2], -1, -1))
    hidden_TL = distance_TL < 0
    if window_tokens is not None:
        hidden_TL |= distance_TL >= window_tokens
    return added_GRTL.masked_fill_(distance_TL >= num_distances, 0.0).masked_fill_(hidden_TL, -torch.inf)
