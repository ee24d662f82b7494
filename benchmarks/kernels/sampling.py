"""The choice of tokens at a vocabulary of 248,320. A floor is one pass over the logits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from case import Launch, Work, bound, case
from torch import Tensor

from strandline.kernels.operation import Operation
from strandline.kernels.sampling.sampling import greedy, mask_top_k_top_p_min_p, sample

VOCAB = 248_320
ROWS = (1, 16, 64, 256)
FILTERS = {
    "top-k-20-top-p-0.95": (20, 0.95, 0.0),
    "top-p-0.95": (0, 0.95, 0.0),
    "min-p-0.05": (0, 1.0, 0.05),
    "top-p-0.95-of-flat-logits": (0, 0.95, 0.0),
}
"""Top-k, top-p and min-p."""


def peaked_logits(rows: int, vocab: int) -> Tensor:
    """Return logits with most of the mass in some hundred tokens, as in language models."""
    logits_NV = 2 * torch.randn(rows, vocab)
    likely_NC = torch.randint(vocab, (rows, min(300, vocab // 4)))
    return logits_NV.scatter_add_(-1, likely_NC, 14 * torch.rand(likely_NC.shape))


def choice(name: str, rows: int, vocab: int = VOCAB) -> Work:
    """Return a choice of tokens."""
    logits_NV = peaked_logits(rows, vocab)
    logits_NV = logits_NV.bfloat16() if name == "greedy-bfloat16" else logits_NV
    if "greedy" in name:
        return _work(greedy, (logits_NV,), limit=0.0)
    # Sums are added in another order, so that another token may be drawn at the edge of two.
    return _work(sample, (logits_NV, torch.rand(rows, dtype=torch.float64)), limit=1.0)


def _work(operation: Operation[..., Any], arguments: tuple[Any, ...], *, limit: float) -> Work:
    return Work(
        {"strandline": bound(operation), "torch": operation.reference},
        [arguments],
        num_bytes=arguments[0].nbytes,
        reference=operation.reference,
        limit=limit,
        peers={"torch"},
        eager={"torch"},
        launches=launches,
    )


for _name in ("greedy-float32", "greedy-bfloat16", "sample"):
    case(f"sampling/{_name}", rows=ROWS, tiny={"rows": 2, "vocab": 640})(partial(choice, _name))


@case("sampling/filters", filters=FILTERS, rows=ROWS, tiny={"filters": (20, 0.95, 0.0), "rows": 2, "vocab": 640})
def filters(filters: tuple[int, float, float], rows: int, vocab: int = VOCAB) -> Work:
    """Return a mask of tokens."""
    is_flat = filters is FILTERS["top-p-0.95-of-flat-logits"]
    logits_NV = torch.randn(rows, vocab) if is_flat else peaked_logits(rows, vocab)
    parameters = [torch.full((rows,), value) for value in filters]
    return _work(mask_top_k_top_p_min_p, (logits_NV, *parameters), limit=1e-3)


def launches() -> Iterator[Launch]:
    for chunk, tiles in ((2048, 1280), (8192, 1280), (4096, 768), (4096, 1600)):
        chunks = {f"sampling.{module}.CHUNK": chunk for module in ("sampling_triton", "filters_triton")}
        yield Launch(f"chunk {chunk}, bound tiles {tiles}", {**chunks, "sampling.filters_triton.BOUND_TILES": tiles})
