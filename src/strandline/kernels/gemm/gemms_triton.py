"""GEMMs with weights of every format on a GPU (``linear.py``): ``launches.py`` chooses the kernel and its launch.

Of few rows, a launch may compute a gated linear unit, and the products with two weights. Invariant: a row's result
depends on that row alone; with fixed launches, to the last bit, whatever the number of rows.

Shape suffixes: as in ``linear.py``; T rows.
"""
# mypy: ignore-errors

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.expansion_triton import Expansion
from strandline.kernels.gemm.formats.dense import DENSE
from strandline.kernels.gemm.launches import (
    LOGITS,
    LOGITS_PAIR,
    LOGITS_TILE,
    MAX_BLOCK_PAIR,
    MAX_ROWS_FEW,
    MAX_ROWS_LOGITS,
    MIN_OUTPUTS_QUANTIZED,
    MIN_ROWS_LOGITS_TILES,
    Kernel,
    Plan,
    choose,
    choose_adapted,
)
from strandline.kernels.gemm.library_triton import multiply_in_library
from strandline.kernels.gemm.logits_triton import logits_of_many
from strandline.kernels.gemm.low_rank import LowRankTerm
from strandline.kernels.gemm.low_rank_triton import add_low_rank, shrink_rows, shrink_tiles
from strandline.kernels.gemm.preloaded_triton import launch_preloaded
from strandline.kernels.gemm.rows_triton import Second, launch_rows
from strandline.kernels.gemm.skinny_triton import launch_skinny
from strandline.kernels.gemm.tiles_triton import launch_heads, launch_tiles
from strandline.kernels.gemm.weights import DenseWeight, QuantizedWeight, StackedWeight, Weight
from strandline.kernels.launch import Launch
from strandline.kernels.operation import Launches
from strandline.kernels.rowwise.activation_triton import swiglu
from strandline.kernels.rowwise.quantized_rows import Rows, flat_rows, new_output, plain_rows, shaped
from strandline.kernels.rowwise.quantizing_triton import quantized, swiglu_quantized


def linear(
    x: Rows,
    weight: Weight,
    bias_O: Tensor | None = None,
    term: LowRankTerm | None = None,
    *,
    launches: Launches = Launches.MEASURED,
) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.linear`.

    Our own kernels add what adapters do, after a launch for their first factors; torch's are followed by two.
    """
    rows = flat_rows(x)
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    out_TO = new_output(rows, sum(part.shape[0] for part in parts))
    expansion, term = None, term if len(rows) else None
    if term is not None and launches is Launches.MEASURED:
        rows, expansion = _shrink(rows, parts, term)
    if isinstance(weight, StackedWeight):
        _multiply_parts(out_TO, rows, weight, bias_O, launches, expansion)
    else:
        multiply_into(out_TO, rows, weight, bias_O, launches, expansion)
    if term is not None and expansion is None:
        add_low_rank(out_TO, plain_rows(rows), *term, launches=launches)
    return shaped(out_TO, x)


def gated_linear(
    x: Rows, weight: Weight, term: LowRankTerm | None = None, *, launches: Launches = Launches.MEASURED
) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.gated_linear`."""
    out_TO = _gate_few(flat_rows(x), weight, term, launches)
    return swiglu(linear(x, weight, None, term, launches=launches)) if out_TO is None else shaped(out_TO, x)


def gated_linear_quantized(
    x: Rows, weight: Weight, term: LowRankTerm | None = None, *, launches: Launches = Launches.MEASURED
) -> Rows:
    """Triton version of :func:`strandline.kernels.gemm.linear.gated_linear_quantized`.

    The product that takes few rows in FP8 quantises them itself.
    """
    rows = flat_rows(x)
    out_TO = _gate_few(rows, weight, term, launches)
    return swiglu_quantized(linear(rows, weight, None, term, launches=launches)) if out_TO is None else out_TO


def head_linear(x_THI: Tensor, weight_HOI: Tensor, *, launches: Launches = Launches.MEASURED) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.head_linear`.

    Rows, heads and the weight may have any strides. Weights are small: the fastest product is torch's.
    """
    if launches is Launches.MEASURED:
        return torch.matmul(x_THI.transpose(0, 1), weight_HOI.mT).transpose(0, 1)
    (num_rows, num_heads, _), num_outputs = x_THI.shape, weight_HOI.shape[1]
    out_THO = torch.empty((num_rows, num_heads, num_outputs), dtype=x_THI.dtype, device=x_THI.device)
    if num_rows:
        launch = DENSE.launches.linear_fixed.choose(num_rows, num_outputs, x_THI.dtype)
        launch_heads(out_THO, x_THI.transpose(0, 1), DenseWeight(weight_HOI), launch)
    return out_THO


def logits(x: Rows, router: DenseWeight, dtype: torch.dtype, *, launches: Launches = Launches.MEASURED) -> Tensor:
    """Triton version of :func:`strandline.kernels.gemm.linear.logits`; the router is contiguous.

    Our kernels convert x as they read it, where torch takes three launches.
    """
    x_TI = flat_rows(plain_rows(x))
    if launches is Launches.FIXED:
        return linear(x_TI.to(dtype), router, launches=launches)
    if 0 < len(x_TI) <= MAX_ROWS_LOGITS:
        logits_TE = _new_logits(x_TI, router, dtype)
        launch_rows(logits_TE, x_TI, router, None, LOGITS)
        return logits_TE
    if len(x_TI) >= MIN_ROWS_LOGITS_TILES and (x_TI.dtype, dtype) == (torch.bfloat16, torch.float32):
        return logits_of_many(x_TI, router.values_OI, LOGITS_TILE)
    return F.linear(x_TI.to(dtype), router.values_OI)


def linear_and_logits(
    x: Rows,
    weight: Weight,
    bias_O: Tensor | None,
    router: DenseWeight,
    dtype: torch.dtype,
    *,
    launches: Launches = Launches.MEASURED,
) -> tuple[Tensor, Tensor]:
    """Triton version of :func:`strandline.kernels.gemm.linear.linear_and_logits`: one launch, if rows are few."""
    rows = flat_rows(x)
    launch = _pair_launch(rows, weight, router, launches)
    if launch is None:
        return linear(x, weight, bias_O, launches=launches), logits(x, router, dtype, launches=launches)
    out_TO, logits_TE = new_output(rows, weight.shape[0]), _new_logits(rows, router, dtype)
    launch_rows(out_TO, rows, weight, bias_O, launch, second=Second(router, logits_TE))
    return shaped(out_TO, x), logits_TE


def _pair_launch(rows: Rows, weight: Weight, router: DenseWeight, launches: Launches) -> Launch | None:
    """Return the launch of both products; None: they take two."""
    if launches is Launches.FIXED or not len(rows) or isinstance(weight, StackedWeight):
        return None
    if isinstance(weight, DenseWeight):
        return LOGITS_PAIR if len(rows) <= MAX_ROWS_FEW else None
    kernel, launch = choose(rows, weight, launches, num_second=router.shape[0])
    return launch if kernel is Kernel.ROWS else None


def _new_logits(rows: Rows, router: DenseWeight, dtype: torch.dtype) -> Tensor:
    return torch.empty((len(rows), router.shape[0]), dtype=dtype, device=router.values_OI.device)


def multiply_into(
    out_TO: Tensor,
    rows: Rows,
    weight: DenseWeight | QuantizedWeight,
    bias_O: Tensor | None,
    launches: Launches,
    expansion: Expansion | None = None,
) -> None:
    """Fill ``out_TO``, a matrix with dense rows, with a product.

    Args:
        expansion: is added; only where ``choose_adapted`` does not name torch.
    """
    if not len(rows):
        return
    kernel, launch = choose(rows, weight, launches) if expansion is None else choose_adapted(rows, weight)
    match kernel:
        case Kernel.ROWS:
            if weight.format.multiplies_fp8 and weight.shape[0] >= MIN_OUTPUTS_QUANTIZED and expansion is None:
                rows = quantized(rows)
            launch_rows(out_TO, rows, weight, bias_O, launch, expansion=expansion)
        case Kernel.SKINNY:
            launch_skinny(out_TO, plain_rows(rows), weight.values_OI, bias_O, launch)
        case Kernel.PRELOADED:
            launch_preloaded(out_TO, rows, weight, bias_O, launch)
        case Kernel.TILES:
            launch_tiles(out_TO, rows, weight, bias_O, launch, expansion=expansion)
        case Kernel.LIBRARY:
            multiply_in_library(out_TO, rows, weight, bias_O)


def _shrink(
    rows: Rows, parts: Sequence[DenseWeight | QuantizedWeight], term: LowRankTerm
) -> tuple[Rows, Expansion | None]:
    """Multiply rows with first factors, if the products with all parts add what adapters do.

    Return the rows as these take them, too: no launch that quantises them may come between.
    """
    kernels = {choose_adapted(rows, part).kernel for part in parts}
    if kernels == {Kernel.ROWS}:
        return rows, shrink_rows(plain_rows(rows), term)
    if not kernels <= {Kernel.ROWS, Kernel.TILES}:
        return rows, None
    rows = quantized(rows) if any(part.format.multiplies_fp8 for part in parts) else rows
    return rows, shrink_tiles(plain_rows(rows), term)


def _gate_few(rows: Rows, weight: Weight, term: LowRankTerm | None, launches: Launches) -> Tensor | None:
    """Return ``silu(gate x) * up x`` of few rows; None: the kernel that multiplies does not apply gates."""
    if isinstance(weight, StackedWeight) or not len(rows):
        return None
    kernel, launch = choose(rows, weight, launches, is_gated=True)
    if kernel is not Kernel.ROWS and (kernel is not Kernel.SKINNY or term is not None):
        return None
    expansion = None if term is None else shrink_rows(plain_rows(rows), term)
    out_TO = new_output(rows, weight.shape[0] // 2)
    if kernel is Kernel.ROWS:
        launch_rows(out_TO, rows, weight, None, launch, is_gated=True, expansion=expansion)
    else:
        launch_skinny(out_TO, plain_rows(rows), weight.values_OI, None, launch, is_gated=True)
    return out_TO


def _multiply_parts(
    out_TO: Tensor,
    rows: Rows,
    weight: StackedWeight,
    bias_O: Tensor | None,
    launches: Launches,
    expansion: Expansion | None,
) -> None:
    """Fill ``out_TO`` part by part; of some rows, a quantised part and a dense one after it take one launch."""
    is_pair = [isinstance(part, DenseWeight) for part in weight.parts] == [False, True]
    if is_pair and bias_O is None and launches is Launches.MEASURED and 0 < len(rows) <= _max_rows_pair(*weight.parts):
        plan = choose(rows, weight.parts[0], launches, num_second=weight.parts[1].shape[0])
        if _takes_pair(plan, expansion):
            _multiply_pair(out_TO, rows, *weight.parts, plan, expansion)
            return
    rows = quantized(rows) if weight.is_in_fp8 else rows
    ends = list(accumulate(part.shape[0] for part in weight.parts))
    for part, start, end in zip(weight.parts, [0, *ends], ends, strict=False):
        bias = None if bias_O is None else bias_O[start:end]
        added = None if expansion is None else expansion.of_outputs(slice(start, end))
        multiply_into(out_TO[:, start:end], rows, part, bias, launches, added)


def _max_rows_pair(weight: QuantizedWeight, _: DenseWeight) -> int:
    linear = weight.format.launches.linear
    return 0 if linear is None else linear.max_rows_pair


def _takes_pair(plan: Plan, expansion: Expansion | None) -> bool:
    """Return whether a launch multiplies with a dense weight, too."""
    kernel, launch = plan
    if kernel is Kernel.LIBRARY or (expansion is not None and kernel is not Kernel.ROWS):
        return False
    return kernel is not Kernel.TILES or launch.block_m <= MAX_BLOCK_PAIR


def _multiply_pair(
    out_TO: Tensor,
    rows: Rows,
    weight: QuantizedWeight,
    dense: DenseWeight,
    plan: Plan,
    expansion: Expansion | None,
) -> None:
    num_outputs, (kernel, launch) = weight.shape[0], plan
    if kernel is Kernel.ROWS:
        second = Second(dense, out_TO[:, num_outputs:])
        launch_rows(out_TO, rows, weight, None, launch, second=second, expansion=expansion)
    elif kernel is Kernel.PRELOADED:
        launch_preloaded(out_TO, rows, weight, None, launch, dense)
    else:
        launch_tiles(out_TO, rows, weight, None, launch, dense)
