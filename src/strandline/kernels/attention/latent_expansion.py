"""Softmax attention over latents whose heads' keys and values are computed again, in plain torch.

``latent_attention.py`` folds the up projections into queries and outputs: a pair of a query and a key then costs 1,088
multiplications per head where keys have 192 channels and values 128. With many queries it is cheaper to apply the
projections to every latent once, and to attend in the heads' own channels.

The reference implementation, which also runs on CPUs.

Source: DeepSeek-AI, "DeepSeek-V2", section 2.1.

Shape suffixes: T tokens, H heads, K channels of a head's key that come from the latent, P those that all heads share, D
both, V channels of a head's value, R channels of a latent, C those of what memory holds of a token, B blocks, N
sequences, M blocks of a sequence, L keys of a sequence or of several, one after the other. Of a block, P are its
tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.attention.attention import attend_sequence
from strandline.kernels.batch import AttentionBatch
from strandline.kernels.operation import operation, triton

MARGIN: Final = 1.5
"""By how much the multiplications saved must exceed those of the projections."""

PIECE_BYTES: Final = 256 << 20
"""Size of the keys and values that are in memory at a time."""


def is_expansion_worthwhile(
    batch: AttentionBatch, num_decodes: int, *, latent_dim: int, shared_dim: int, key_dim: int, value_dim: int
) -> bool:
    """Return whether a step's prefills attend with fewer multiplications to keys and values that are computed again.

    A step of a CUDA graph does not know its lengths, and one that verifies drafts has few queries.
    """
    starts = batch.query_starts
    if batch.is_padded or batch.most_rows is not None or len(starts) <= num_decodes + 1:
        return False
    num_pairs = num_keys = 0
    for (start, end), context_len in zip(pairwise(starts[num_decodes:]), batch.context_lens[num_decodes:], strict=True):
        num_pairs += (end - start) * (context_len - (end - start) // 2)
        num_keys += context_len
    saved = num_pairs * (2 * latent_dim + shared_dim - (key_dim + shared_dim + value_dim))
    return saved > MARGIN * num_keys * latent_dim * (key_dim + value_dim)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the keys of a step's prefills, which lie one sequence after the other."""

    start: int
    """Where it begins among all."""
    block_L: Tensor
    offset_L: Tensor
    """Where the latents are."""


def pieces_of(batch: AttentionBatch, num_decodes: int, num_keys: int) -> tuple[Tensor, list[Piece]]:
    """Return where the keys of each prefill begin among all, int64, and pieces of ``num_keys`` keys.

    Every layer of a step asks for the same.
    """
    name = ("pieces of latents", num_decodes, num_keys)
    if name not in batch.gathers:
        len_N, table_NM = batch.context_lens_N[num_decodes:], batch.block_table_NM[num_decodes:]
        end_N = len_N.cumsum(0)
        base_N = end_N - len_N
        total = sum(batch.context_lens[num_decodes:])
        pieces = []
        for start in range(0, total, num_keys):
            key_L = torch.arange(start, min(start + num_keys, total), device=len_N.device)
            sequence_L = torch.searchsorted(end_N, key_L, right=True)
            position_L = key_L - base_N[sequence_L]
            pieces.append(Piece(start, table_NM[sequence_L, position_L // BLOCK_TOKENS], position_L % BLOCK_TOKENS))
        batch.gathers[name] = base_N, pieces
    found: tuple[Tensor, list[Piece]] = batch.gathers[name]
    return found


def piece_keys(key_up_HKR: Tensor, value_up_HVR: Tensor) -> int:
    """Return how many keys a piece has."""
    num_channels = key_up_HKR.shape[0] * (key_up_HKR.shape[1] + value_up_HVR.shape[1])
    return max(BLOCK_TOKENS, PIECE_BYTES // (num_channels * key_up_HKR.itemsize))


def expand(latent_LC: Tensor, key_up_HKR: Tensor, value_up_HVR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads' keys ``k_LHK`` and values ``v_LHV`` of latents."""
    latent_LR = latent_LC[:, : key_up_HKR.shape[2]]
    k_LHK, v_LHV = (
        F.linear(latent_LR, up.flatten(0, 1)).view(len(latent_LC), *up.shape[:2]) for up in (key_up_HKR, value_up_HVR)
    )
    return k_LHK, v_LHV


@operation(triton("attention.latent_expansion_triton"))
def expanded_latent_attention(
    q_THD: Tensor,
    latent_BPC: Tensor,
    key_up_HKR: Tensor,
    value_up_HVR: Tensor,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
) -> Tensor:
    """Attend the rows after the decodes', each to its sequence's tokens up to itself, whose latents are stored.

    Args:
        q_THD: the channels of a head that meet its own key, then those that meet the shared one.
        num_decodes: how many sequences, from the first, have one token each; they are left out.

    Returns:
        ``out_THV``, contiguous.
    """
    num_heads, value_dim = value_up_HVR.shape[:2]
    out_THV = q_THD.new_empty(len(q_THD), num_heads, value_dim)
    for rows, latent_LC in _sequences(latent_BPC, batch, num_decodes):
        k_LHK, v_LHV = expand(latent_LC, key_up_HKR, value_up_HVR)
        shared_LHP = latent_LC[:, None, key_up_HKR.shape[2] :].expand(-1, num_heads, -1)
        k_LHD = torch.cat((k_LHK, shared_LHP), dim=-1)
        attend_sequence(q_THD[rows].unsqueeze(2), k_LHD, v_LHV, out_THV[rows].unsqueeze(2), scale, None)
    return out_THV


def _sequences(latent_BPC: Tensor, batch: AttentionBatch, num_decodes: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each prefill among all of them, and the latents of its context."""
    first = batch.query_starts[num_decodes]
    for i in range(num_decodes, len(batch.context_lens)):
        rows = slice(batch.query_starts[i] - first, batch.query_starts[i + 1] - first)
        num_blocks = -(-batch.context_lens[i] // BLOCK_TOKENS)
        yield rows, latent_BPC[batch.block_table_NM[i, :num_blocks]].flatten(0, 1)[: batch.context_lens[i]]
