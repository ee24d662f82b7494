"""What lies between attention's input projection and attention: norms, rotary embedding, storing keys and values.

Invariants: of the blocks only the rows named for writing are written; the null block never is.

Shape suffixes: T tokens, O features of the fused projection, G key/value heads, H query heads, X heads of several
kinds, D head dim, B blocks, P tokens in a block.
"""

import torch
from torch import Tensor

from strandline.ids import NULL_BLOCK
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.norm import rms_norm_heads_zero_centered
from strandline.kernels.operation import KEYS_AND_VALUES, numba, operation, triton
from strandline.kernels.rotary import apply_rotary


@operation(triton("qkv_triton", invariant="qkv_triton"), numba("qkv_numba", memory=KEYS_AND_VALUES))
def prepare_qkv(
    projected_TO: Tensor,
    num_heads: int,
    q_norm_D: Tensor,
    k_norm_D: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    memory: KVMemory,
    batch: AttentionBatch,
) -> Tensor:
    """Normalise and turn queries and keys, store keys and values in their blocks; return ``q_THD``.

    Args:
        projected_TO: per row queries ``[H, D]``, keys ``[G, D]``, values ``[G, D]``, and possibly more behind them.
        q_norm_D: weight of a zero-centred RMS norm over each head, applied before the rotary embedding.
        rotary: as :func:`strandline.kernels.rotary.rotary_table` returns it.
    """
    num_kv_heads, head_dim = memory.k_BPGD.shape[2:]
    num_turned = num_heads + num_kv_heads
    heads_TXD = projected_TO[:, : (num_turned + num_kv_heads) * head_dim].view(len(projected_TO), -1, head_dim)
    weight_XD = torch.cat((q_norm_D.expand(num_heads, -1), k_norm_D.expand(num_kv_heads, -1)))
    turned_TXD = apply_rotary(rms_norm_heads_zero_centered(heads_TXD[:, :num_turned], weight_XD, eps), rotary)
    write_kv(turned_TXD[:, num_heads:], heads_TXD[:, num_turned:], memory, batch)
    return turned_TXD[:, :num_heads]


def write_kv(k_TGD: Tensor, v_TGD: Tensor, memory: KVMemory, batch: AttentionBatch) -> None:
    """Store keys and values of the step into their blocks."""
    blocks, offsets = batch.write_blocks_T, batch.write_offsets_T
    if not batch.is_all_written:
        rows = (blocks != NULL_BLOCK).nonzero().squeeze(-1)
        blocks, offsets, k_TGD, v_TGD = blocks[rows], offsets[rows], k_TGD[rows], v_TGD[rows]
    memory.k_BPGD[blocks, offsets] = k_TGD
    memory.v_BPGD[blocks, offsets] = v_TGD
