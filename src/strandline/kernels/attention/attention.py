"""Softmax attention over keys and values that lie in blocks, in plain torch.

The reference implementation, which also runs on CPUs without Numba. Sequences are attended one by
one, in their order in the step.

Invariants: what a sequence does not own never reaches its result, NaN included: neither other blocks, nor the
rows of its last block past its context, nor the null block.

Shape suffixes: T tokens, N sequences, M blocks of a sequence, L keys of a sequence, B blocks, P tokens in a block,
G key/value heads, R query heads per key/value head, H = G R query heads, D head dim.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (sinks, here as learnt scores).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.ids import BLOCK_TOKENS
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.operation import KEYS_AND_VALUES, numba, operation, triton

QUERY_TOKENS = 256
"""Queries of a sequence that are masked together: bounds the mask of a prompt of any length."""


@operation(
    triton("attention.attention_triton", takes_launches=True),
    numba("attention.attention_numba", memory=KEYS_AND_VALUES, channel_multiples={"key": 2}),
)
def paged_attention(
    q_THD: Tensor,
    memory: KVMemory,
    batch: AttentionBatch,
    num_decodes: int,
    *,
    scale: float,
    window_tokens: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Attend every token to its sequence's tokens up to itself; return ``out_THD``.

    The step's own keys and values must have been written before.

    Args:
        num_decodes: how many sequences, from the first, have one token each.
        window_tokens: a token sees itself and the ``window_tokens - 1`` tokens before it; None: all before it.
        is_causal: if false, a token also sees the tokens after it, to the end of its sequence.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    q_TGRD, out_TGRD = (x.unflatten(1, (memory.k_BPGD.shape[2], -1)) for x in (q_THD, out_THD))
    for rows, k_LGD, v_LGD in gathered_sequences(memory, batch, 0, window_tokens, q_THD.dtype):
        inputs = (q_TGRD[rows], k_LGD, v_LGD, out_TGRD[rows], scale * memory.k_scale, window_tokens)
        if memory.sinks_H is None:
            attend_sequence(*inputs, is_causal=is_causal)
        else:
            attend_with_sinks(*inputs, memory.sinks_H, is_causal=is_causal)
    return out_THD if memory.v_scale == 1 else out_THD.mul_(memory.v_scale)


def gathered_sequences(
    memory: KVMemory, batch: AttentionBatch, first: int, window_tokens: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows of each sequence from the first on, and ``k_LGD`` and ``v_LGD`` of what they see.

    Args:
        dtype: dtype of e4m3 numbers that are yielded.
    """
    for i in range(first, len(batch.context_lens)):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        table_M, span = batch.block_table_NM[i], seen_span(batch, i, window_tokens)
        yield rows, gathered(memory.k_BPGD, table_M, span, dtype), gathered(memory.v_BPGD, table_M, span, dtype)


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


def seen_span(batch: AttentionBatch, sequence: int, window_tokens: int | None) -> Span:
    """Return the positions that a sequence's queries of the step see."""
    end = batch.context_lens[sequence]
    first_query = end - (batch.query_starts[sequence + 1] - batch.query_starts[sequence])
    return Span(0 if window_tokens is None else max(0, first_query - window_tokens + 1), end)


def gathered(stream_BPGD: Tensor, table_M: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of one sequence's span, and nothing around it.

    Args:
        dtype: dtype of e4m3 numbers that are returned.
    """
    start, end = span.rows
    blocks_M = table_M[span.first_block : span.first_block + span.num_blocks]
    if stream_BPGD.dtype != torch.float8_e4m3fn:
        return stream_BPGD.index_select(0, blocks_M).flatten(0, 1)[start:end]
    # Bytes, because torch selects no FP8 numbers by index.
    bytes_LGD = stream_BPGD.view(torch.uint8).index_select(0, blocks_M).flatten(0, 1)[start:end]
    return bytes_LGD.view(torch.float8_e4m3fn).to(dtype)


def attend_sequence(
    q_TGRD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
    *,
    is_causal: bool = True,
) -> None:
    """Attend the last T of a sequence's L tokens, as ``paged_attention`` does, into ``out_TGRD``."""
    num_queries, num_keys = len(q_TGRD), len(k_LGD)
    offset = num_keys - num_queries
    heads_per_key = q_TGRD.shape[2]
    if num_queries == 1:
        # All keys are seen, so that the query heads of a key/value head can stand where queries do.
        k_1GLD, v_1GLD = (x.transpose(0, 1).unsqueeze(0) for x in (k_LGD, v_LGD))
        out_TGRD.copy_(F.scaled_dot_product_attention(q_TGRD, k_1GLD, v_1GLD, scale=scale))
        return
    k_GRLD, v_GRLD = (by_query_head(x, heads_per_key) for x in (k_LGD, v_LGD))
    q_GRTD, out_GRTD = q_TGRD.permute(1, 2, 0, 3), out_TGRD.permute(1, 2, 0, 3)
    if (offset == 0 or not is_causal) and (window_tokens is None or num_keys <= window_tokens):
        out_GRTD.copy_(F.scaled_dot_product_attention(q_GRTD, k_GRLD, v_GRLD, is_causal=is_causal, scale=scale))
        return
    for start in range(0, num_queries, QUERY_TOKENS):
        end = min(start + QUERY_TOKENS, num_queries)
        first = 0 if window_tokens is None else max(0, offset + start - window_tokens + 1)
        last = offset + end if is_causal else num_keys
        mask_TL = _mask((offset + start, offset + end), (first, last), window_tokens, q_TGRD, is_causal=is_causal)
        out_GRTD[:, :, start:end] = F.scaled_dot_product_attention(
            q_GRTD[:, :, start:end], k_GRLD[:, :, first:last], v_GRLD[:, :, first:last], attn_mask=mask_TL, scale=scale
        )


def attend_with_sinks(
    q_TGRD: Tensor,
    k_LGD: Tensor,
    v_LGD: Tensor,
    out_TGRD: Tensor,
    scale: float,
    window_tokens: int | None,
    sinks_H: Tensor,
    *,
    is_causal: bool = True,
) -> None:
    """Attend as ``attend_sequence`` does, with a sink in each head's softmax; in float32."""
    num_queries, num_keys = len(q_TGRD), len(k_LGD)
    offset, heads = num_keys - num_queries, q_TGRD.shape[1:3]
    k_GLD, v_GLD = (x.transpose(0, 1).float() for x in (k_LGD, v_LGD))
    for start in range(0, num_queries, QUERY_TOKENS):
        end = min(start + QUERY_TOKENS, num_queries)
        positions = (offset + start, offset + end)
        q_GRTD = q_TGRD[start:end].permute(1, 2, 0, 3).float()
        mask_TL = _mask(positions, (0, num_keys), window_tokens, q_GRTD, is_causal=is_causal)
        score_GRTL = q_GRTD @ k_GLD.mT.unsqueeze(1) * scale + mask_TL
        sink_GRT1 = sinks_H.float().view(*heads, 1, 1).expand(*heads, end - start, 1)
        weight_GRTL = torch.cat((score_GRTL, sink_GRT1), dim=-1).softmax(-1)[..., :-1]
        out_TGRD[start:end] = (weight_GRTL @ v_GLD.unsqueeze(1)).permute(2, 0, 1, 3)


def by_query_head(x_LGD: Tensor, heads_per_key: int) -> Tensor:
    """Return keys or values as ``x_GRLD``, the same for all query heads of a key/value head.

    A view on CPUs. On GPUs, torch 2.11 returns a wrong last query under a mask where these heads share memory and
    there is one query more than a multiple of 64.
    """
    x_GRLD = x_LGD.transpose(0, 1).unsqueeze(1).expand(-1, heads_per_key, -1, -1)
    return x_GRLD if x_LGD.device.type == "cpu" else x_GRLD.contiguous()


def _mask(
    queries: tuple[int, int], keys: tuple[int, int], window_tokens: int | None, like: Tensor, *, is_causal: bool
) -> Tensor:
    """Return what is added to the scores of queries against keys at these positions: 0 or minus infinity."""
    query_T1 = torch.arange(*queries, device=like.device).unsqueeze(-1)
    key_L = torch.arange(*keys, device=like.device)
    hidden_TL = (key_L > query_T1) & is_causal
    if window_tokens is not None:
        hidden_TL |= key_L <= query_T1 - window_tokens
    return torch.zeros(hidden_TL.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_TL, -torch.inf)
