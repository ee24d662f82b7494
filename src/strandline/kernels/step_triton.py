"""The Triton twins of ``step.py``: one small launch each."""

# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from strandline.ids import PendingToken
from strandline.kernels.sizes import cdiv

BLOCK_SEQUENCES = 128
BLOCK_FEATURES = 1024


# Numbers of sequences, and where slices of small tables start, must not ask for a kernel to be compiled anew.
@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["dst", "last_rows", "pending", "source_rows", "sampled", "stop_sets"],
)
def _resolve_kernel(
    token_ids,
    dst,
    last_rows,
    pending,
    source_rows,
    sampled,
    stop_sets,
    stop_ids,
    num_sequences,
    MAY_STOP: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_sequences
    kind = tl.load(pending + n, mask, 0)
    is_pending = kind != 0
    row = tl.load(last_rows + n, mask, 0)
    source = tl.load(source_rows + n, is_pending, 0)
    token = tl.load(sampled + source, is_pending, 0)
    tl.store(token_ids + row, token, is_pending)
    stop_set = tl.load(stop_sets + n, mask, 0)
    is_over = kind > MAY_STOP
    for i in tl.static_range(NUM_STOPS):
        is_over = is_over | (tl.load(stop_ids + stop_set * NUM_STOPS + i, mask, -1) == token)
    is_over = is_over & (kind == MAY_STOP)
    zero = tl.zeros([BLOCK], dtype=tl.int64)
    tl.store(dst + n, zero.to(dst.dtype.element_ty), is_over)


def resolve_pending(
    token_ids_T: Tensor,
    dst_N: Tensor,
    last_rows_N: Tensor,
    pending_N: Tensor,
    source_rows_N: Tensor,
    sampled_M: Tensor,
    stop_sets_N: Tensor,
    stop_ids_XI: Tensor,
) -> None:
    """As ``step.resolve_pending``; all tensors contiguous."""
    num_sequences = dst_N.shape[0]
    _resolve_kernel[(cdiv(num_sequences, BLOCK_SEQUENCES),)](
        token_ids_T,
        dst_N,
        last_rows_N,
        pending_N,
        source_rows_N,
        sampled_M,
        stop_sets_N,
        stop_ids_XI,
        num_sequences,
        MAY_STOP=int(PendingToken.MAY_STOP),
        NUM_STOPS=stop_ids_XI.shape[1],
        BLOCK=BLOCK_SEQUENCES,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["rows", "slots"])
def _store_hidden_kernel(hidden, rows, out, slots, size, hidden_stride, out_stride, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    slot = tl.load(slots + n).to(tl.int64)
    row = tl.load(rows + n).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (features < size) & (slot != 0)
    value = tl.load(hidden + row * hidden_stride + features, mask)
    tl.store(out + slot * out_stride + features, value, mask)


def store_hidden(hidden_TE: Tensor, rows_N: Tensor, hidden_SE: Tensor, slots_N: Tensor) -> None:
    """As ``step.store_hidden``."""
    size = hidden_TE.shape[1]
    _store_hidden_kernel[(rows_N.shape[0], cdiv(size, BLOCK_FEATURES))](
        hidden_TE,
        rows_N,
        hidden_SE,
        slots_N,
        size,
        hidden_TE.stride(0),
        hidden_SE.stride(0),
        BLOCK=BLOCK_FEATURES,
        num_warps=4,
    )
