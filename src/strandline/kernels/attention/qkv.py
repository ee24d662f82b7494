"""What lies between attention's input projection and attention: norms, rotary embedding, storing keys and values.

Invariants: of the blocks only the rows named for writing are written; the null block never is.

Shape suffixes: T tokens, O features of all heads side by side, G key/value heads, H query heads, D head dim, B blocks,
P tokens in a block, F rotated pairs per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from strandline.ids import NULL_BLOCK
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import KEYS_AND_VALUES, numba, operation, triton
from strandline.kernels.rowwise.norm import rms_norm_heads, rms_norm_heads_zero_centered
from strandline.kernels.rowwise.quantized_rows import MAX_E4M3
from strandline.kernels.rowwise.rotary import apply_rotary


class HeadNorm(NamedTuple):
    """An RMS norm over each head of queries and keys."""

    q_D: Tensor
    k_D: Tensor
    eps: float
    is_zero_centered: bool
    """Whether the weights are added to 1 (``rms_norm_zero_centered``), or multiply what is rounded (``rms_norm``)."""

    def __call__(self, x: Tensor, weight_D: Tensor) -> Tensor:
        """Normalise in torch."""
        norm = rms_norm_heads_zero_centered if self.is_zero_centered else rms_norm_heads
        return norm(x, weight_D, self.eps)


@operation(
    triton("attention.qkv_triton", takes_launches=True),
    numba("attention.qkv_numba", memory=KEYS_AND_VALUES),
)
def prepare_qkv(
    q_TO: Tensor,
    k_TO: Tensor,
    v_TO: Tensor,
    norm: HeadNorm | None,
    rotary: tuple[Tensor, Tensor] | None,
    memory: KVMemory,
    batch: AttentionBatch,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in their blocks; return ``q_THD``.

    Args:
        q_TO: per row ``[H, D]``; of keys and values ``[G, D]``. They may be columns of one tensor; rows may lie apart.
        norm: applied before the rotary embedding; None: there is none.
        rotary: as :func:`strandline.kernels.rowwise.rotary.rotary_table` returns it; None: positions are not embedded.
    """
    q_THD, k_TGD, v_TGD = (x.unflatten(-1, (-1, memory.k_BPGD.shape[-1])) for x in (q_TO, k_TO, v_TO))
    # Copies, since the rotary embedding works in place.
    query_THD: Tensor = q_THD.clone() if norm is None else norm(q_THD, norm.q_D)
    key_TGD: Tensor = k_TGD.clone() if norm is None else norm(k_TGD, norm.k_D)
    if rotary is not None:
        query_THD, key_TGD = apply_rotary(query_THD, rotary), apply_rotary(key_TGD, rotary)
    write_kv(key_TGD, v_TGD, memory, batch)
    return query_THD


def write_kv(k_TGD: Tensor, v_TGD: Tensor, memory: KVMemory, batch: AttentionBatch) -> None:
    """Store keys and values of the step into their blocks."""
    blocks, offsets = batch.write_blocks_T, batch.write_offsets_T
    if not batch.is_all_written:
        rows = (blocks != NULL_BLOCK).nonzero().squeeze(-1)
        blocks, offsets, k_TGD, v_TGD = blocks[rows], offsets[rows], k_TGD[rows], v_TGD[rows]
    for stream_BPGD, new_TGD, scale in ((memory.k_BPGD, k_TGD, memory.k_scale), (memory.v_BPGD, v_TGD, memory.v_scale)):
        if stream_BPGD.dtype != torch.float8_e4m3fn:
            stream_BPGD[blocks, offsets] = new_TGD
        else:
            # Bytes, because torch stores no FP8 numbers by index.
            stream_BPGD.view(torch.uint8)[blocks, offsets] = to_e4m3(new_TGD, scale).view(torch.uint8)


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """Return numbers as they are stored in e4m3: divided by a scale, limited, and rounded to the nearest."""
    return (x.float() * (1 / scale)).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
