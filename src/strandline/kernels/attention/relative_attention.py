"""Softmax attention whose scores depend on the distance between query and key as each query says, in plain torch.

A query mixes *profiles*, numbers for each distance, into one profile: what is added to its scores of keys at these
distances. Keys further away get nothing added.

The reference implementation, which also runs on CPUs. Invariants: those of ``attention.py``.

Source: ``transformers`` (``inkling``, its relative logits; ``inkling2``, its sinks).

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
    sinks_TH: Tensor | None = None
    """A further score of each query's softmax, to which no value belongs; heads are dense. None: there is none."""

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Factors and profiles as kernels take them."""
        strides, num_distances = self.mix_THC.stride()[:2], self.profiles_CX.shape[1]
        return self.mix_THC, *strides, self.profiles_CX, num_distances

    @property
    def rows(self) -> dict[str, Tensor]:
        """The fields that have a row for each token."""
        fields = {"mix_THC": self.mix_THC, "sinks_TH": self.sinks_TH}
        return {name: rows for name, rows in fields.items() if rows is not None}


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
    mix_THC, profiles_CX, sinks_TH = relative
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_TGRD, mix_TGRC, out_TGRD = (x.unflatten(1, (memory.k_BPGD.shape[2], -1)) for x in (q_THD, mix_THC, out_THD))
    scale *= memory.k_scale
    for rows, k_LGD, v_LGD in gathered_sequences(memory, batch, 0, window_tokens, q_THD.dtype):
        sinks_TGR = None if sinks_TH is None else sinks_TH[rows].unflatten(1, q_TGRD.shape[1:3])
        queries = (q_TGRD[rows], mix_TGRC[rows], profiles_CX, sinks_TGR)
        _attend_sequence(*queries, (k_LGD, v_LGD), out_TGRD[rows], scale, window_tokens)
    return out_THD if memory.v_scale == 1 else out_THD.mul_(memory.v_scale)


def _attend_sequence(
    q_TGRD: Tensor,
    mix_TGRC: Tensor,
    profiles_CX: Tensor,
    sinks_TGR: Tensor | None,
    kv_LGD: tuple[Tensor, Tensor],
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
) -> None:
    """Attend the last T of a sequence's L tokens, each to those up to itself, into ``out_TGRD``."""
    num_queries, num_heads, heads_per_key = q_TGRD.shape[:3]
    before = len(kv_LGD[0]) - num_queries
    k_GRLD, v_GRLD = (by_query_head(x, heads_per_key) for x in kv_LGD)
    q_GRTD, mix_GRTC, out_GRTD = (x.permute(1, 2, 0, 3) for x in (q_TGRD, mix_TGRC, out_TGRD))
    num_rows = max(1, min(QUERY_TOKENS, MAX_SCORES // (num_heads * heads_per_key * len(kv_LGD[0]))))
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        first = 0 if window_tokens is None else max(0, before + start - window_tokens + 1)
        keys = slice(first, before + rows.stop)
        profile_GRTX = mix_GRTC[:, :, rows] @ profiles_CX
        added_GRTL = _added(profile_GRTX, (before + start, keys.stop), (keys.start, keys.stop), window_tokens)
        inputs = (q_GRTD[:, :, rows], k_GRLD[:, :, keys], v_GRLD[:, :, keys])
        if sinks_TGR is None:
            out_GRTD[:, :, rows] = F.scaled_dot_product_attention(*inputs, attn_mask=added_GRTL, scale=scale)
        else:
            sink_GRT1 = sinks_TGR[rows].permute(1, 2, 0).unsqueeze(-1)
            out_GRTD[:, :, rows] = _attend_with_sinks(*inputs, added_GRTL, sink_GRT1, scale)


def _attend_with_sinks(
    q_GRTD: Tensor, k_GRLD: Tensor, v_GRLD: Tensor, added_GRTL: Tensor, sink_GRT1: Tensor, scale: float
) -> Tensor:
    """Attend with a further score in each softmax; in float32."""
    score_GRTL = q_GRTD.float() @ k_GRLD.float().mT * scale + added_GRTL.float()
    weight_GRTL = torch.cat((score_GRTL, sink_GRT1.float()), dim=-1).softmax(-1)[..., :-1]
    return weight_GRTL @ v_GRLD.float()


def _added(profile_GRTX: Tensor, queries: tuple[int, int], keys: tuple[int, int], window_tokens: int | None) -> Tensor:
    """Return what is added to the scores of queries against keys at these positions; minus infinity hides a key."""
    device, num_distances = profile_GRTX.device, profile_GRTX.shape[-1]
    distance_TL = torch.arange(*queries, device=device).unsqueeze(-1) - torch.arange(*keys, device=device)
    index_TL = distance_TL.clamp(0, num_distances - 1)
    added_GRTL = profile_GRTX.gather(-1, index_TL.expand(*profile_GRTX.shape[:2], -1, -1))
    hidden_TL = distance_TL < 0
    if window_tokens is not None:
        hidden_TL |= distance_TL >= window_tokens
    return added_GRTL.masked_fill_(distance_TL >= num_distances, 0.0).masked_fill_(hidden_TL, -torch.inf)
