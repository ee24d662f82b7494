"""The experts of a few tokens on a GPU, in two launches, whatever the weights' format: every product is a GEMV.

Both kernels take each token's experts from the router's logits by themselves, which costs less than a launch between
would. The first also computes the shared expert's projections, as those of one more expert, or activates them where a
launch before has computed them, in separate programs; the second computes that expert's output. Where that has
adapters, more programs of the first multiply features with first factors, activated again. The second reads weights
before the first has ended: only the hidden features depend on that.

Invariants: as in ``moe_triton.py``.

Shape suffixes: as in ``moe.py``; Q ranks of adapters, I inputs of these; in kernels M rows of x, N features, K the
dimension that a product sums over, C a token's choices (``top_k``, padded to a power of two), R ranks.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.experts.activation_triton import activate, activation_argument
from strandline.kernels.experts.moe import ExpertWeights, SharedExpert
from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import (
    can_choose_by_warp,
    choice_options,
    choose_experts,
    choose_nth,
    choose_nth_by_warp,
    weigh_experts,
)
from strandline.kernels.gemm.expansion_triton import (
    Expansion,
    ExpansionConstants,
    expand,
    find_factors,
    load_factors,
    load_hidden,
)
from strandline.kernels.gemm.formats.few_rows_triton import multiply_few
from strandline.kernels.gemm.formats.operand_triton import Operand, RowFunctions, operand, rows_operand
from strandline.kernels.gemm.weights import DenseWeight, Weight
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.rowwise.quantized_rows import Rows
from strandline.kernels.sizes import cdiv, next_power_of_2


class _ProjectedArgument(NamedTuple):
    """A shared expert's projections, and where its hidden features go, as a runtime argument."""

    projected_ptr: Tensor
    """Not read where the kernel computes them."""
    stride_projected: int
    hidden_ptr: Tensor
    size: int
    num_tokens: int


class _ShrinkArgument(NamedTuple):
    """First factors of adapters of a shared expert's second product, as a runtime argument."""

    down_SQI: Tensor
    slots_T: Tensor
    stride_slot: int
    out_TQ: Tensor
    num_ranks: int


SHRINK_INPUTS = tl.constexpr(512)
"""Features that a program activates and multiplies at a time."""


@triton.jit
def add_bias(out_MN, bias_ptr, expert_M, col_N, num_rows):
    """Add the bias of each row's expert to some of its features."""
    bias_MN_ptr = bias_ptr + expert_M[:, None].to(tl.int64) * num_rows + col_N[None, :]
    return out_MN + tl.load(bias_MN_ptr, mask=(col_N < num_rows)[None, :], other=0.0).to(tl.float32)


@triton.jit
def add_biases(first_MN, up_MN, bias_ptr, expert_M, col_N, F, IS_GATED: tl.constexpr):
    """Add the biases of the first product, of gates and up projections or of these alone."""
    bias_MN_ptr = bias_ptr + expert_M[:, None].to(tl.int64) * (F * (1 + IS_GATED)) + col_N[None, :]
    is_MN = (col_N < F)[None, :]
    first_MN += tl.load(bias_MN_ptr, mask=is_MN, other=0.0).to(tl.float32)
    if IS_GATED:
        up_MN += tl.load(bias_MN_ptr + F, mask=is_MN, other=0.0).to(tl.float32)
    return first_MN, up_MN


class _SharedArgument(NamedTuple):
    """A shared expert's hidden features and second product as a runtime argument."""

    x: tuple
    gate_ptr: Tensor | None
    stride_gate: int
    weight: tuple
    size: int
    expansion: Expansion | None


class _SharedConstants(NamedTuple):
    """What is compiled in of a shared expert."""

    rows: RowFunctions
    layout: NamedTuple
    block_k: int
    expansion: ExpansionConstants | None

    @property
    def cache_key(self) -> str:
        """See ``RowFunctions``."""
        return f"{self.rows.cache_key}-{tuple(self)[1:]}"


@triton.jit
def _features(shared, token, col, ACTIVATE: tl.constexpr):
    """Return some of a shared expert's hidden features of a token."""
    is_col = col < shared.size
    first_ptr = shared.projected_ptr + token * shared.stride_projected + col
    first = tl.load(first_ptr, mask=is_col, other=0.0).to(tl.float32)
    up = first
    if ACTIVATE.is_gated:
        up = tl.load(first_ptr + shared.size, mask=is_col, other=0.0).to(tl.float32)
    return activate(first, up, ACTIVATE, shared.hidden_ptr.dtype.element_ty)


@triton.jit
def _activate_shared(shared, token, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr):
    """Write some of a shared expert's hidden features of a token."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = _features(shared, token, col, ACTIVATE)
    tl.store(shared.hidden_ptr + token * shared.size + col, hidden, mask=col < shared.size)


@triton.jit
def _shrink_shared(shared, shrink, token, ACTIVATE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a shared expert's hidden features of a token times some of its adapter's first factors."""
    rank_Q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_rank_Q = rank_Q < shrink.num_ranks
    slot = tl.maximum(tl.load(shrink.slots_T + token), 0)
    down_Q_ptr = shrink.down_SQI + slot * shrink.stride_slot + rank_Q.to(tl.int64) * shared.size
    sum_Q = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, shared.size, SHRINK_INPUTS):
        col_K = start + tl.arange(0, SHRINK_INPUTS)
        mask_QK = is_rank_Q[:, None] & (col_K < shared.size)[None, :]
        down_QK = tl.load(down_Q_ptr[:, None] + col_K[None, :], mask=mask_QK, other=0.0).to(tl.float32)
        sum_Q += tl.sum(down_QK * _features(shared, token, col_K, ACTIVATE).to(tl.float32)[None, :], axis=1)
    tl.store(shrink.out_TQ + token * shrink.num_ranks + rank_Q, sum_Q, mask=is_rank_Q)


@triton.jit
def _few_up_kernel(
    x,
    logits_ptr,
    bias_ptr,
    weight,
    up_bias_ptr,
    shared,
    shrink,
    hidden_ptr,
    stride_logits,
    D,
    F,
    E,
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    COMPUTES_SHARED: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    choice = tl.program_id(1)
    first_N = tl.program_id(0) * BLOCK_N
    if COMPUTES_SHARED:
        choice -= shared.num_tokens
    if not LOADS_FIRST:
        wait_for_previous(OVERLAPS)
        release_next(OVERLAPS)
    if COMPUTES_SHARED and choice < 0:
        # The shared expert's weights come after those of experts that are held, and are known before the wait.
        is_computed = True
        token, expert = tl.program_id(1).to(tl.int64), tl.cast(num_held, tl.int64)
        hidden_row_ptr = shared.hidden_ptr + token * F
    else:
        if LOADS_FIRST:
            wait_for_previous(OVERLAPS)
            release_next(OVERLAPS)
        if shared is not None and not COMPUTES_SHARED:
            choice -= shared.num_tokens
            if choice < 0:
                _activate_shared(shared, tl.program_id(1).to(tl.int64), ACTIVATE, BLOCK_SHARED)
                return
        if BLOCK_RANKS > 0:
            choice -= shared.num_tokens
            if choice < 0:
                _shrink_shared(shared, shrink, (choice + shared.num_tokens).to(tl.int64), ACTIVATE, BLOCK_RANKS)
                return
        token = (choice // TOP_K).to(tl.int64)
        hidden_row_ptr = hidden_ptr + choice.to(tl.int64) * F
        logits_row_ptr = logits_ptr + token * stride_logits
        if WARPS > 0:
            logits_row_ptr = tl.multiple_of(logits_row_ptr, 16)
            expert = choose_nth_by_warp(logits_row_ptr, E, choice % TOP_K, BLOCK_I, WARPS).to(tl.int64)
        else:
            expert = choose_nth(logits_row_ptr, bias_ptr, E, choice % TOP_K, ROUTING, BLOCK_G, BLOCK_I).to(tl.int64)
        is_computed = True
        if IS_DIVIDED:
            expert = expert - first_expert
            is_computed = (expert >= 0) & (expert < num_held)
    if is_computed:
        row_N = first_N + tl.arange(0, BLOCK_N)
        expert_C = expert + tl.arange(0, 1)
        loaded = ROWS.load(weight, expert_C, first_N, 0, F, D, LAYOUT, ACTIVATE.is_gated, IS_EVEN, BLOCK_N, BLOCK_K)
        if LOADS_FIRST:
            wait_for_previous(OVERLAPS)
            release_next(OVERLAPS)
        first_MN, up_MN = multiply_few(
            loaded,
            x,
            None,
            token + tl.arange(0, 1),
            tl.full([1], True, tl.int1),
            weight,
            expert_C,
            first_N,
            F,
            D,
            ROWS,
            LAYOUT,
            None,
            ACTIVATE.is_gated,
            IS_EVEN,
            NUM_K,
            BLOCK_N,
            BLOCK_K,
        )
        if up_bias_ptr is not None:
            first_MN, up_MN = add_biases(first_MN, up_MN, up_bias_ptr, expert_C, row_N, F, ACTIVATE.is_gated)
        hidden_MN = activate(first_MN, up_MN, ACTIVATE, hidden_ptr.dtype.element_ty)
        tl.store(hidden_row_ptr + row_N[None, :], hidden_MN, mask=(row_N < F)[None, :])


@triton.jit
def _load_shared(shared, first_N, D, SHARED: tl.constexpr, BLOCK_N: tl.constexpr):
    ROWS: tl.constexpr = SHARED.rows
    LAYOUT: tl.constexpr = SHARED.layout
    of_chunk = (shared.weight, tl.zeros([1], dtype=tl.int32), first_N, 0, D, shared.size)
    return ROWS.load(*of_chunk, LAYOUT, False, False, BLOCK_N, SHARED.block_k)


@triton.jit
def _load_factors(shared, token, first_N, D, SHARED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load what adapters add to some outputs of the shared expert with; nothing of it depends on launches before."""
    EXPANSION: tl.constexpr = SHARED.expansion
    token_M = token + tl.arange(0, 1)
    row_N = first_N + tl.arange(0, BLOCK_N)
    found = find_factors(shared.expansion, token_M, tl.full([1], True, tl.int1), row_N, row_N < D)
    return found, load_factors(shared.expansion, found, row_N, 0, EXPANSION)


@triton.jit
def _multiply_shared(
    loaded, added, shared, token, first_N, D, SHARED: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return what the shared expert makes of a token's hidden features, times its gate.

    Args:
        added: what ``_load_factors`` returned; None: there are no adapters.
    """
    EXPANSION: tl.constexpr = SHARED.expansion
    if EXPANSION is not None:
        found, factors = added
        token_M = token + tl.arange(0, 1)
        hidden_MNR = load_hidden(shared.expansion, found, token_M, 0, EXPANSION)
    ROWS: tl.constexpr = SHARED.rows
    LAYOUT: tl.constexpr = SHARED.layout
    out_1N, _ = multiply_few(
        loaded,
        shared.x,
        None,
        token + tl.arange(0, 1),
        tl.full([1], True, tl.int1),
        shared.weight,
        tl.zeros([1], dtype=tl.int32),
        first_N,
        D,
        shared.size,
        ROWS,
        LAYOUT,
        None,
        False,
        False,
        1,
        BLOCK_N,
        SHARED.block_k,
    )
    if EXPANSION is not None:
        row_N = first_N + tl.arange(0, BLOCK_N)
        out_1N += expand(shared.expansion, found, factors, hidden_MNR, token_M, row_N, EXPANSION)
    out_N = tl.reshape(out_1N, [BLOCK_N]).to(DTYPE).to(tl.float32)
    if shared.gate_ptr is not None:
        factor = tl.load(shared.gate_ptr + token * shared.stride_gate).to(tl.float32)
        out_N *= tl.sigmoid(factor).to(DTYPE).to(tl.float32)
    return out_N


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    logits_ptr,
    bias_ptr,
    weight,
    down_bias_ptr,
    shared,
    out_ptr,
    stride_logits,
    D,
    F,
    E,
    first_expert,
    num_held,
    ROUTING: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    SHARED: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    TOP_K: tl.constexpr = ROUTING.top_k
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    first_N = tl.program_id(0) * (BLOCKS * BLOCK_N)
    choice_C = tl.arange(0, BLOCK_C)
    is_choice_C = choice_C < TOP_K
    # Logits are there already, since the kernel before has waited for them; not so the hidden features.
    shared_added = None
    if SHARED is not None:
        shared_loaded = _load_shared(shared, first_N, D, SHARED, BLOCK_N)
        if SHARED.expansion is not None:
            shared_added = _load_factors(shared, token, first_N, D, SHARED, BLOCK_N)
    logits_row_ptr = logits_ptr + token * stride_logits
    chosen_C, chosen = choose_experts(logits_row_ptr, bias_ptr, E, ROUTING, BLOCK_G, BLOCK_I, BLOCK_C)
    if IS_DIVIDED:
        chosen_C = chosen_C - first_expert
        is_choice_C = is_choice_C & (chosen_C >= 0) & (chosen_C < num_held)
    if IS_DIVIDED or TOP_K < BLOCK_C:
        # Others read again what one of them reads: masks would take half as many registers again.
        chosen_C = tl.where(is_choice_C, chosen_C, tl.max(tl.where(is_choice_C, chosen_C, 0), axis=0))
    loaded = ROWS.load(weight, chosen_C, first_N, 0, D, F, LAYOUT, False, IS_EVEN, BLOCK_N, BLOCK_K)
    # Weights of experts take as many barriers as two of the choices: theirs are on their way meanwhile.
    weight_C = weigh_experts(chosen, bias_ptr, ROUTING, BLOCK_G, BLOCK_C)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    hidden = (hidden_ptr + token * TOP_K * F, None, F, 0)
    outs = ()
    for block in tl.static_range(BLOCKS):
        if block + 1 < BLOCKS:
            next_N = first_N + BLOCK_N
            next_loaded = ROWS.load(weight, chosen_C, next_N, 0, D, F, LAYOUT, False, IS_EVEN, BLOCK_N, BLOCK_K)
            if SHARED is not None:
                next_shared_loaded = _load_shared(shared, next_N, D, SHARED, BLOCK_N)
                if SHARED.expansion is not None:
                    next_shared_added = _load_factors(shared, token, next_N, D, SHARED, BLOCK_N)
        out_CN, _ = multiply_few(
            loaded,
            hidden,
            None,
            choice_C,
            is_choice_C,
            weight,
            chosen_C,
            first_N,
            D,
            F,
            ROWS,
            LAYOUT,
            None,
            False,
            IS_EVEN,
            1,
            BLOCK_N,
            BLOCK_K,
        )
        if down_bias_ptr is not None:
            out_CN = add_bias(out_CN, down_bias_ptr, chosen_C, first_N + tl.arange(0, BLOCK_N), D)
        out_CN = tl.where(is_choice_C[:, None], out_CN.to(dtype).to(tl.float32) * weight_C[:, None], 0.0)
        out_N = tl.sum(out_CN, axis=0)
        if SHARED is not None:
            shared_N = _multiply_shared(shared_loaded, shared_added, shared, token, first_N, D, SHARED, dtype, BLOCK_N)
            out_N = out_N.to(dtype).to(tl.float32) + shared_N
        outs += (out_N,)
        if block + 1 < BLOCKS:
            first_N, loaded = next_N, next_loaded
            if SHARED is not None:
                shared_loaded = next_shared_loaded
                if SHARED.expansion is not None:
                    shared_added = next_shared_added
    # Nothing is written between tiles: the compiler reads hidden features, and quantises them, once for all.
    for block in tl.static_range(BLOCKS):
        row_N = (tl.program_id(0) * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + token * D + row_N, outs[block].to(dtype), mask=row_N < D)


def mixture_few(
    x_TD: Rows,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    routing: Routing,
    launches: Pair,
) -> Tensor:
    """Return the weighted sum of each token's experts, and of the shared one after its gate, choice by choice.

    Args:
        x_TD: rows are dense, as those of the shared expert's projections; quantised ones are taken by experts in FP8.
    """
    (up, down), (num_held, num_channels, size) = launches, experts.down.shape
    num_tokens, num_choices = len(x_TD), len(x_TD) * routing.top_k
    hidden_AF = torch.empty((num_choices, size), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty((num_tokens, num_channels), dtype=x_TD.dtype, device=x_TD.device)
    up_bias, down_bias = experts.biases or (None, None)
    held = (0 if experts.held is None else experts.held.start, num_held)
    sizes = (logits_TE.stride(0), num_channels, size, logits_TE.shape[1], *held)
    options = {
        "IS_DIVIDED": experts.held is not None,
        **choice_options(routing, logits_TE.shape[1]),
        **overlap_options(logits_TE),
    }
    (weight, shared_options), (_, block_n, block_k) = _up_weight(experts, shared), _fit(experts.up, up, num_channels)
    programs = cdiv(size, block_n)
    projected, shrink = (None, None) if shared is None else _shared_features(shared, x_TD)
    _few_up_kernel[(programs, num_choices + ((projected is not None) + (shrink is not None)) * num_tokens)](
        rows_operand(x_TD),
        logits_TE,
        bias_E,
        weight.data,
        up_bias,
        projected,
        shrink,
        hidden_AF,
        *sizes,
        LAYOUT=weight.layout,
        ROWS=weight.functions.rows,
        ACTIVATE=activation_argument(experts.activation),
        BLOCK_SHARED=1 if projected is None else next_power_of_2(cdiv(projected.size, programs)),
        BLOCK_RANKS=0 if shrink is None else next_power_of_2(cdiv(shrink.num_ranks, programs)),
        IS_EVEN=num_channels % block_k == 0 and size % block_n == 0,
        NUM_K=cdiv(num_channels, block_k),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=up.warps,
        WARPS=up.warps if can_choose_by_warp(logits_TE, bias_E, routing) else 0,
        **shared_options,
        **options,
    )
    (argument, constants), (weight, block_n, block_k) = (None, None), _fit(experts.down, down, size)
    if shared is not None:
        expansion = None if shrink is None else Expansion.of(shrink.out_TQ.unsqueeze(0), shared.term)
        of_shared = (shared, projected.hidden_ptr, expansion, down._replace(block_n=block_n))
        argument, constants, block_n = _shared_arguments(*of_shared)
    rows_down = block_n * down.blocks
    _few_down_kernel[(cdiv(num_channels, rows_down), len(x_TD))](
        hidden_AF,
        logits_TE,
        bias_E,
        weight.data,
        down_bias,
        argument,
        out_TD,
        *sizes,
        LAYOUT=weight.layout,
        ROWS=weight.functions.rows,
        SHARED=constants,
        IS_EVEN=size == block_k and num_channels % rows_down == 0,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCKS=down.blocks,
        num_warps=down.warps,
        **options,
    )
    return out_TD


def _up_weight(experts: ExpertWeights, shared: SharedExpert | None) -> tuple[Operand, dict[str, bool]]:
    """Return the first product's weight, with the shared expert's if it is computed, and what this compiles in."""
    if shared is None or shared.up is None:
        return operand(experts.up), {"COMPUTES_SHARED": False, "LOADS_FIRST": False}
    # Of dense weights these take registers, and fewer programs run at once.
    loads_first = not isinstance(experts.up, DenseWeight)
    return operand(experts.up, shared.up), {"COMPUTES_SHARED": True, "LOADS_FIRST": loads_first}


def _fit(weight: Weight, launch: Launch, num_inputs: int) -> tuple[Operand, int, int]:
    """Return a weight as an argument, and blocks of rows and inputs that its format allows."""
    argument, block_k = operand(weight), min(launch.block_k, next_power_of_2(num_inputs))
    return argument, argument.layout.fit_rows(launch.block_n), max(argument.functions.min_block_k, block_k)


def _shared_features(shared: SharedExpert, x_TD: Rows) -> tuple[_ProjectedArgument, _ShrinkArgument | None]:
    """Return a shared expert's projections and its adapters as arguments, with memory for what is made of them."""
    num_tokens, size, projected_TS = len(x_TD), shared.down.shape[1], shared.projected_TS
    hidden_TS = torch.empty((num_tokens, size), dtype=x_TD.dtype, device=x_TD.device)
    if projected_TS is None:
        projected_TS = hidden_TS
    projected = _ProjectedArgument(projected_TS, projected_TS.stride(0), hidden_TS, size, num_tokens)
    if shared.term is None:
        return projected, None
    down_SQI, slots_T = shared.term.weights.down_SPRI.flatten(1, 2), shared.term.tiled.slots_T
    num_ranks = down_SQI.shape[1]
    out_TQ = torch.empty((num_tokens, num_ranks), dtype=torch.float32, device=down_SQI.device)
    return projected, _ShrinkArgument(down_SQI, slots_T, down_SQI.stride(0), out_TQ, num_ranks)


def _shared_arguments(
    shared: SharedExpert, hidden_TS: Tensor, expansion: Expansion | None, launch: Launch
) -> tuple[_SharedArgument, _SharedConstants, int]:
    """Return a shared expert as arguments, and a block of rows that its format allows, too."""
    size = shared.down.shape[1]
    weight, block_n, block_k = _fit(shared.down, launch, size)
    stride_gate = 0 if shared.gate_T1 is None else shared.gate_T1.stride(0)
    argument = _SharedArgument(rows_operand(hidden_TS), shared.gate_T1, stride_gate, weight.data, size, expansion)
    ranks = None if expansion is None else expansion.constants
    return argument, _SharedConstants(weight.functions.rows, weight.layout, block_k, ranks), block_n
