"""Hyper-connections on a GPU: two launches for a part of a layer.

The first one adds the output of the part before to the streams, and multiplies these with the weight of the mixes:
each program some channels of all streams. The second one adds up these products, whose order is that of the channels,
and computes mixes and the part's input: a token's input and its other mixes in a program each, since Sinkhorn's
algorithm takes as long as the rest.

A float32 weight is multiplied with streams in bfloat16 as the sum of three weights in bfloat16, which have all of its
bits. Mixes are computed in float32, and streams are rounded once.

Invariant: a token's results depend on that token alone; with fixed launches, to the last bit, whatever the number of
tokens.

Shape suffixes: as in ``hyper_connections.py``; in kernels M tokens and C channels of a program, K channels of all
streams, P programs that share a token's channels.
"""
# mypy: ignore-errors

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.expert_choices_triton import choices_argument, num_added, sum_of_choices
from strandline.kernels.operation import Launches
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.streams.hyper_connections import HyperMixes, HyperWeights

ELEMENTS_PER_WARP = 2048
"""Elements of the streams that a warp of the second kernel mixes."""

MIN_DOT = 16
"""Least size of a matrix that tensor cores multiply."""


class MixLaunch(NamedTuple):
    """How the first kernel is launched."""

    block_m: int
    block_k: int
    """Channels of all streams that a program multiplies at a time."""
    blocks: int
    """How many times it does."""
    warps: int


FEW, MANY = MixLaunch(16, 256, 1, 4), MixLaunch(64, 128, 16, 8)
MAX_TOKENS_FEW = 256

MIXES_MEASURED = 32
"""Mixes of four streams, as many as published models have, with the sum of squares and rounded up."""


@triton.jit
def _load_weight(
    weight_ptr,
    start,
    end,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Return the weight's columns of some channels of all streams; those from ``end`` on are zeros."""
    index_K = tl.arange(0, BLOCK_S * BLOCK_C)
    stream_K = index_K // BLOCK_C
    channel_K = start + index_K % BLOCK_C
    row_O = tl.arange(0, BLOCK_O)
    mask_KO = ((stream_K < S) & (channel_K < end))[:, None] & (row_O < S * (S + 2))[None, :]
    weight_KO_ptr = weight_ptr + (stream_K * E + channel_K)[:, None] + row_O[None, :] * (S * E)
    return tl.load(weight_KO_ptr, mask=mask_KO, other=0.0)


@triton.jit
def _add_product(x_MK, weight_KO, acc_MO):
    """Add the product with a float32 weight, all of whose bits count."""
    if x_MK.dtype == tl.bfloat16:
        high_KO = weight_KO.to(tl.bfloat16)
        less_KO = weight_KO - high_KO.to(tl.float32)
        middle_KO = less_KO.to(tl.bfloat16)
        low_KO = (less_KO - middle_KO.to(tl.float32)).to(tl.bfloat16)
        acc_MO = tl.dot(x_MK, high_KO, acc_MO)
        acc_MO = tl.dot(x_MK, middle_KO, acc_MO)
        acc_MO = tl.dot(x_MK, low_KO, acc_MO)
    else:
        acc_MO = tl.dot(x_MK.to(tl.float32), weight_KO, acc_MO, input_precision="ieee")
    return acc_MO


@triton.jit(do_not_specialize=["T"])
def _add_output_kernel(
    stream_ptr,
    next_ptr,
    output_ptr,
    output_mix_ptr,
    stream_mix_ptr,
    weight_ptr,
    part_ptr,
    T,
    stride_t,
    stride_s,
    stride_output,
    choices,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the next streams, and what some channels add to the logits of their mixes and to the sum of squares."""
    dtype = stream_ptr.dtype.element_ty
    token_M = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    stream_S = tl.arange(0, BLOCK_S)
    is_token_M = token_M < T
    is_stream_S = stream_S < S
    mask_MS = is_token_M[:, None] & is_stream_S[None, :]
    first = tl.program_id(1) * (BLOCKS * BLOCK_C)
    end = tl.minimum(first + BLOCKS * BLOCK_C, E)
    if weight_ptr is not None and BLOCKS == 1:
        weight_KO = _load_weight(weight_ptr, first, end, S, E, BLOCK_S, BLOCK_C, BLOCK_O)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if next_ptr is not None:
        mix_MS = tl.load(output_mix_ptr + token_M[:, None] * S + stream_S[None, :], mask=mask_MS, other=0.0)
        output_mix_MS = mix_MS.to(dtype).to(tl.float32)
        for start in range(first, end, BLOCK_C):
            channel_C = start + tl.arange(0, BLOCK_C)
            mask_MC = is_token_M[:, None] & (channel_C < end)[None, :]
            sum_MSC = tl.zeros([BLOCK_M, BLOCK_S, BLOCK_C], dtype=tl.float32)
            for stream in tl.static_range(S):
                mix_MS_ptr = stream_mix_ptr + (token_M * S + stream)[:, None] * S + stream_S[None, :]
                mix_MS = tl.load(mix_MS_ptr, mask=mask_MS, other=0.0).to(dtype).to(tl.float32)
                x_MC_ptr = stream_ptr + (token_M * stride_t + stream * stride_s)[:, None] + channel_C[None, :]
                x_MC = tl.load(x_MC_ptr, mask=mask_MC, other=0.0).to(tl.float32)
                sum_MSC += mix_MS[:, :, None] * x_MC[:, None, :]
            if TOP_K > 0:
                output_MC = sum_of_choices(choices, token_M, channel_C, is_token_M, mask_MC, E, TOP_K).to(tl.float32)
            else:
                output_MC_ptr = output_ptr + (token_M * stride_output)[:, None] + channel_C[None, :]
                output_MC = tl.load(output_MC_ptr, mask=mask_MC, other=0.0).to(tl.float32)
            # Rounded once: a product that is rounded before it is added may be contracted in some elements alone.
            next_MSC = (sum_MSC + output_MC[:, None, :] * output_mix_MS[:, :, None]).to(dtype)
            row_MS = token_M[:, None] * (S * E) + (stream_S * E)[None, :]
            mask_MSC = mask_MC[:, None, :] & is_stream_S[None, :, None]
            tl.store(next_ptr + row_MS[:, :, None] + channel_C[None, None, :], next_MSC, mask=mask_MSC)
        # The product reads them as tensor cores do, in other threads: held in registers, they would take all of these.
        tl.debug_barrier()
        stream_ptr = next_ptr
        stride_t = S * E
        stride_s = E
    if weight_ptr is not None:
        acc_MO = tl.zeros([BLOCK_M, BLOCK_O], dtype=tl.float32)
        square_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        index_K = tl.arange(0, BLOCK_S * BLOCK_C)
        x_MK_ptr = stream_ptr + (token_M * stride_t)[:, None] + (index_K // BLOCK_C * stride_s)[None, :]
        for start in range(first, end, BLOCK_C):
            channel_K = start + index_K % BLOCK_C
            mask_K = (index_K // BLOCK_C < S) & (channel_K < end)
            x_MK = tl.load(x_MK_ptr + channel_K[None, :], mask=is_token_M[:, None] & mask_K[None, :], other=0.0)
            if BLOCKS > 1:
                weight_KO = _load_weight(weight_ptr, start, end, S, E, BLOCK_S, BLOCK_C, BLOCK_O)
            square_M += tl.sum(x_MK.to(tl.float32) * x_MK.to(tl.float32), axis=1)
            acc_MO = _add_product(x_MK, weight_KO, acc_MO)
        index_O = tl.arange(0, BLOCK_O)
        row_M = token_M * tl.num_programs(1) + tl.program_id(1)
        part_MO = tl.where((index_O == S * (S + 2))[None, :], square_M[:, None], acc_MO)
        tl.store(part_ptr + row_M[:, None] * BLOCK_O + index_O[None, :], part_MO, mask=is_token_M[:, None])


@triton.jit
def _scale_of(part_ptr, num_parts, eps, S: tl.constexpr, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return what a token's streams are multiplied with to be normalised."""
    part_P = tl.arange(0, BLOCK_P)
    square = tl.sum(tl.load(part_ptr + part_P * BLOCK_O + S * (S + 2), mask=part_P < num_parts, other=0.0), axis=0)
    return tl.rsqrt(square / (S * E) + eps)


@triton.jit
def _logits(
    part_ptr,
    bias_ptr,
    num_parts,
    first,
    scale,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Return a logit for each stream, from the mix ``first`` on."""
    part_P = tl.arange(0, BLOCK_P)
    mix_S = tl.arange(0, BLOCK_S)
    mask_PS = (part_P < num_parts)[:, None] & (mix_S < S)[None, :]
    part_PS = tl.load(part_ptr + part_P[:, None] * BLOCK_O + first + mix_S[None, :], mask=mask_PS, other=0.0)
    return tl.sum(part_PS, axis=0) * scale + tl.load(bias_ptr + first + mix_S, mask=mix_S < S, other=0.0)


@triton.jit
def _balance(logit_SS, num_iterations, eps, S: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return mixes whose rows and columns have a sum of nearly one."""
    index_S = tl.arange(0, BLOCK_S)
    logit_SS = tl.where((index_S < S)[None, :], logit_SS, float("-inf"))
    mix_SS = tl.exp(logit_SS - tl.max(logit_SS, axis=1)[:, None])
    mix_SS = mix_SS / tl.sum(mix_SS, axis=1)[:, None] + eps
    mix_SS = tl.where((index_S < S)[:, None] & (index_S < S)[None, :], mix_SS, 0.0)
    mix_SS = mix_SS / (tl.sum(mix_SS, axis=0) + eps)[None, :]
    for _ in range(num_iterations - 1):
        mix_SS = mix_SS / (tl.sum(mix_SS, axis=1) + eps)[:, None]
        mix_SS = mix_SS / (tl.sum(mix_SS, axis=0) + eps)[None, :]
    return mix_SS


@triton.jit
def _stream_logits(
    part_ptr,
    bias_ptr,
    num_parts,
    scale,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Return the logits of the streams' mixes."""
    index_S = tl.arange(0, BLOCK_S)
    mix_SS = 2 * S + index_S[:, None] * S + index_S[None, :]
    mask_SS = (index_S < S)[:, None] & (index_S < S)[None, :]
    part_P = tl.arange(0, BLOCK_P)
    part_PSS_ptr = part_ptr + (part_P * BLOCK_O)[:, None, None] + mix_SS[None, :, :]
    part_PSS = tl.load(part_PSS_ptr, mask=(part_P < num_parts)[:, None, None] & mask_SS[None, :, :], other=0.0)
    return tl.sum(part_PSS, axis=0) * scale + tl.load(bias_ptr + mix_SS, mask=mask_SS, other=0.0)


@triton.jit(do_not_specialize=["num_parts", "num_iterations"])
def _mix_kernel(
    stream_ptr,
    part_ptr,
    bias_ptr,
    scale_ptr,
    norm_ptr,
    input_ptr,
    output_mix_ptr,
    stream_mix_ptr,
    num_parts,
    num_iterations,
    stride_t,
    stride_s,
    eps,
    mix_eps,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a token's input of a part, or its mixes of output and streams; without products, the streams' mean."""
    token = tl.program_id(0).to(tl.int64)
    index_S = tl.arange(0, BLOCK_S)
    is_stream_S = index_S < S
    channel_E = tl.arange(0, BLOCK_E)
    mask_E = channel_E < E
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if part_ptr is not None:
        part_ptr += token * num_parts * BLOCK_O
    if tl.program_id(1) == 0:
        dtype = stream_ptr.dtype.element_ty
        x_SE_ptr = stream_ptr + token * stride_t + (index_S * stride_s)[:, None] + channel_E[None, :]
        x_SE = tl.load(x_SE_ptr, mask=is_stream_S[:, None] & mask_E[None, :], other=0.0)
        weight_E = tl.load(norm_ptr + channel_E, mask=mask_E, other=0.0).to(tl.float32)
        if part_ptr is None:
            share_S = tl.full([BLOCK_S], 1.0 / S, tl.float32)
        else:
            scale = _scale_of(part_ptr, num_parts, eps, S, E, BLOCK_P, BLOCK_O) * tl.load(scale_ptr)
            logit_S = _logits(part_ptr, bias_ptr, num_parts, 0, scale, S, BLOCK_S, BLOCK_P, BLOCK_O)
            share_S = tl.sigmoid(logit_S) + mix_eps
        mixed_E = tl.sum(x_SE.to(tl.float32) * share_S[:, None], axis=0).to(dtype).to(tl.float32)
        norm_scale = tl.rsqrt(tl.sum(mixed_E * mixed_E, axis=0) / E + eps)
        normed_E = (mixed_E * norm_scale).to(dtype).to(tl.float32) * weight_E
        tl.store(input_ptr + token * E + channel_E, normed_E.to(dtype), mask=mask_E)
    elif part_ptr is not None:
        scale = _scale_of(part_ptr, num_parts, eps, S, E, BLOCK_P, BLOCK_O)
        output_scale = scale * tl.load(scale_ptr + 1)
        logit_S = _logits(part_ptr, bias_ptr, num_parts, S, output_scale, S, BLOCK_S, BLOCK_P, BLOCK_O)
        tl.store(output_mix_ptr + token * S + index_S, 2.0 * tl.sigmoid(logit_S), mask=is_stream_S)
        stream_scale = scale * tl.load(scale_ptr + 2)
        logit_SS = _stream_logits(part_ptr, bias_ptr, num_parts, stream_scale, S, BLOCK_S, BLOCK_P, BLOCK_O)
        mix_SS = _balance(logit_SS, num_iterations, mix_eps, S, BLOCK_S)
        mix_SS_ptr = stream_mix_ptr + token * (S * S) + index_S[:, None] * S + index_S[None, :]
        tl.store(mix_SS_ptr, mix_SS, mask=is_stream_S[:, None] & is_stream_S[None, :])


def connect_part(
    stream_TSE: Tensor,
    mixes: HyperMixes | None,
    output: Summand | None,
    weights: HyperWeights,
    *,
    launches: Launches = Launches.MEASURED,
) -> tuple[Tensor, Tensor, HyperMixes]:
    """Triton version of :func:`strandline.kernels.streams.hyper_connections.connect_part`."""
    launch = MANY if len(stream_TSE) > MAX_TOKENS_FEW and launches is Launches.MEASURED else FEW
    stream_TSE, part_TPO = _add_output(stream_TSE, mixes, output, weights.mix_OI, launch)
    num_tokens, num_streams, _ = stream_TSE.shape
    new = partial(torch.empty, dtype=torch.float32, device=stream_TSE.device)
    mixes = HyperMixes(new(num_tokens, num_streams), new(num_tokens, num_streams, num_streams))
    input_TE = _launch_mix(stream_TSE, part_TPO, weights, mixes)
    return input_TE, stream_TSE, mixes


def average_streams(
    stream_TSE: Tensor, mixes: HyperMixes | None, output: Summand | None, norm_E: Tensor, eps: float
) -> Tensor:
    """Triton version of :func:`strandline.kernels.streams.hyper_connections.average_streams`."""
    stream_TSE, _ = _add_output(stream_TSE, mixes, output, None, FEW)
    return _launch_mix(stream_TSE, None, HyperWeights(None, None, None, norm_E, 0, eps, 0.0), HyperMixes(None, None))


def _add_output(
    stream_TSE: Tensor,
    mixes: HyperMixes | None,
    output: Summand | None,
    weight_OI: Tensor | None,
    launch: MixLaunch,
) -> tuple[Tensor, Tensor | None]:
    """Return the streams with the output of a part, and what each program adds to logits and squares, float32."""
    num_tokens, num_streams, num_channels = stream_TSE.shape
    sizes = _sizes(stream_TSE, launch)
    num_parts = cdiv(num_channels, launch.blocks * sizes["BLOCK_C"])
    part_TPO = None
    if weight_OI is not None:
        shape = (num_tokens, num_parts, sizes["BLOCK_O"])
        part_TPO = torch.empty(shape, dtype=torch.float32, device=stream_TSE.device)
    choices = output if isinstance(output, ExpertChoices) else None
    next_TSE = (
        None if mixes is None else torch.empty(stream_TSE.shape, dtype=stream_TSE.dtype, device=stream_TSE.device)
    )
    if num_tokens and (next_TSE is not None or part_TPO is not None):
        added_TE = output if choices is None and mixes is not None else None
        if added_TE is not None and added_TE.stride(-1) != 1:
            added_TE = added_TE.contiguous()
        _add_output_kernel[(cdiv(num_tokens, launch.block_m), num_parts)](
            stream_TSE,
            next_TSE,
            added_TE,
            *((None, None) if mixes is None else mixes),
            weight_OI,
            part_TPO,
            num_tokens,
            stream_TSE.stride(0),
            stream_TSE.stride(1),
            0 if added_TE is None else added_TE.stride(0),
            choices_argument(choices),
            S=num_streams,
            E=num_channels,
            **sizes,
            BLOCK_M=launch.block_m,
            BLOCKS=launch.blocks,
            TOP_K=num_added(choices),
            num_warps=launch.warps,
            **overlap_options(stream_TSE),
        )
    return stream_TSE if next_TSE is None else next_TSE, part_TPO


def _launch_mix(stream_TSE: Tensor, part_TPO: Tensor | None, weights: HyperWeights, mixes: HyperMixes) -> Tensor:
    """Return the input of a part, and fill its mixes."""
    num_tokens, num_streams, num_channels = stream_TSE.shape
    input_TE = torch.empty((num_tokens, num_channels), dtype=stream_TSE.dtype, device=stream_TSE.device)
    if not num_tokens:
        return input_TE
    num_parts = 0 if part_TPO is None else part_TPO.shape[1]
    block_s, block_e = next_power_of_2(num_streams), next_power_of_2(num_channels)
    _mix_kernel[(num_tokens, 1 if part_TPO is None else 2)](
        stream_TSE,
        part_TPO,
        weights.bias_O,
        weights.scale_3,
        weights.norm_E,
        input_TE,
        *mixes,
        num_parts,
        weights.num_iterations,
        stream_TSE.stride(0),
        stream_TSE.stride(1),
        weights.eps,
        weights.mix_eps,
        S=num_streams,
        E=num_channels,
        BLOCK_S=block_s,
        BLOCK_E=block_e,
        BLOCK_P=next_power_of_2(max(1, num_parts)),
        BLOCK_O=_block_of_mixes(num_streams),
        num_warps=max(4, min(16, block_s * block_e // ELEMENTS_PER_WARP)),
        **overlap_options(stream_TSE),
    )
    return input_TE


def _sizes(stream_TSE: Tensor, launch: MixLaunch) -> dict[str, int]:
    """Return the sizes of blocks: of streams, channels, and mixes with the sum of squares."""
    _, num_streams, num_channels = stream_TSE.shape
    block_s, block_o = next_power_of_2(num_streams), _block_of_mixes(num_streams)
    # As many channels of a wider weight, or of a wider dtype, as registers hold.
    block_k = launch.block_k * MIXES_MEASURED // max(MIXES_MEASURED, block_o) * 2 // stream_TSE.element_size()
    block_c = min(block_k, max(MIN_DOT, block_s * next_power_of_2(num_channels))) // block_s
    return {"BLOCK_S": block_s, "BLOCK_C": block_c, "BLOCK_O": block_o}


def _block_of_mixes(num_streams: int) -> int:
    return max(MIN_DOT, next_power_of_2(num_streams * (num_streams + 2) + 1))
