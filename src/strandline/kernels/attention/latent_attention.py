"""Softmax attention whose keys and values are one latent per token, in plain torch.

A latent is a key of every head, and its first channels are the value: what heads make of it is folded into their
queries and outputs.

The reference implementation, which also runs on CPUs. Invariants: those of ``attention.py``.

Source: DeepSeek-AI, "DeepSeek-V2", section 2.1 and appendix B (the absorbed form).

Shape suffixes: T tokens, H query heads, B blocks, P tokens in a block, D channels of a latent, V those of its value;
G is one key/value head, R query heads per key/value head, L keys of a sequence.
"""

import torch
from torch import Tensor

from strandline.kernels.attention.attention import attend_sequence, gathered_sequences
from strandline.kernels.attention.stored_tokens import store_tokens
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import operation, triton


@operation(triton("attention.latent_attention_triton", takes_launches=True))
def latent_attention(
    q_THD: Tensor,
    latent_TD: Tensor,
    latent_BPD: Tensor,
    batch: AttentionBatch,
    num_decodes: int,
    value_dim: int,
    *,
    scale: float,
) -> Tensor:
    """Store the step's latents in their blocks, then attend every token to its sequence's up to itself.

    Args:
        q_THD: queries of all tokens, or of the decodes alone: then these alone attend.
        num_decodes: how many sequences, from the first, have one token each.
        value_dim: V, at most D.

    Returns:
        ``out_THV``, what each head reads of the latents' first ``value_dim`` channels.
    """
    store_tokens.reference(latent_TD, latent_BPD, batch)
    memory = KVMemory(latent_BPD.unsqueeze(2), latent_BPD[..., :value_dim].unsqueeze(2))
    out_THV = q_THD.new_empty(*q_THD.shape[:2], value_dim)
    q_TGRD, out_TGRV = q_THD.unsqueeze(1), out_THV.unsqueeze(1)
    for rows_of_one, k_LGD, v_LGV in gathered_sequences(memory, batch, 0, None, q_THD.dtype):
        if rows_of_one.stop > len(q_THD):
            break
        attend_sequence(q_TGRD[rows_of_one], k_LGD, v_LGV, out_TGRV[rows_of_one], scale, None)
    return out_THV


def latent_attention_reference(q_THD: Tensor, latent_TD: Tensor, value_dim: int, scale: float) -> Tensor:
    """Return ``out_THV`` of one whole sequence, by the definition: kept as the baseline."""
    is_later_TT = torch.ones(len(latent_TD), len(latent_TD), dtype=torch.bool).triu_(1)
    score_HTT = (torch.einsum("thd,ld->htl", q_THD, latent_TD) * scale).masked_fill(is_later_TT, -torch.inf)
    return torch.einsum("htl,lv->thv", score_HTT.softmax(-1), latent_TD[:, :value_dim])
