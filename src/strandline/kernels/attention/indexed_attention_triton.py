"""The Triton versions of ``indexed_attention.py`` and ``indexed_latent_attention.py``.

Shape suffixes: as in ``indexed_attention.py``; of latents as in ``indexed_latent_attention.py``.
"""
# mypy: ignore-errors

import torch
from torch import Tensor

from strandline.kernels.attention.chosen_attention_triton import attend_chosen
from strandline.kernels.attention.group_choice_triton import Pool, choose_best, mean_keys, weighed_keys
from strandline.kernels.attention.indexed_attention import GroupIndex, IndexedMemory
from strandline.kernels.attention.indexed_latent_attention import PooledIndex
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.operation import Launches


def indexed_attention(
    q_THD: Tensor,
    index_q_TJC: Tensor,
    memory: IndexedMemory,
    batch: AttentionBatch,
    index: GroupIndex,
    *,
    scale: float,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Triton version of :func:`strandline.kernels.attention.indexed_attention.indexed_attention`.

    Needs contiguous channels, and contiguous positions of a block.
    """
    positions_BP3, stride_block = memory.position_BP3, 0
    if positions_BP3 is not None:
        stride_block = positions_BP3.stride(0)
    rotary = (index.inv_freq_F, len(index.inv_freq_F), index.attention_factor)
    positions = (positions_BP3, stride_block, index.dimension_F)
    pool = Pool(mean_keys, (index.key_norm_C, index.eps, *rotary, *positions))
    group_TK = choose_best(index_q_TJC, None, memory.index_BPC, pool, batch, index.group_tokens, index.max_groups)
    kv = (memory.kv.k_BPGD, memory.kv.v_BPGD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    chosen = (group_TK, batch, index.group_tokens, out_THD)
    return attend_chosen(q_THD, kv, *chosen, scale=scale, launches=launches)


def choose_groups(
    index_q_TJC: Tensor, weight_TJ: Tensor, index_BPX: Tensor, batch: AttentionBatch, index: PooledIndex
) -> Tensor:
    """As ``indexed_latent_attention.choose_groups``, in the order of groups. Needs contiguous channels and bias."""
    pool = Pool(weighed_keys, (index.bias_GC,))
    return choose_best(index_q_TJC, weight_TJ, index_BPX, pool, batch, index.group_tokens, index.max_groups)


def indexed_latent_attention(
    q_THD: Tensor,
    latent_BPD: Tensor,
    group_TK: Tensor,
    batch: AttentionBatch,
    group_tokens: int,
    value_dim: int,
    *,
    scale: float,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """As ``indexed_latent_attention.indexed_latent_attention``. Needs contiguous channels."""
    out_THV = torch.empty(*q_THD.shape[:2], value_dim, dtype=q_THD.dtype, device=q_THD.device)
    chosen = (group_TK, batch, group_tokens, out_THV)
    return attend_chosen(q_THD, (latent_BPD.unsqueeze(2), None), *chosen, scale=scale, launches=launches)
