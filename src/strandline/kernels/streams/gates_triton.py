"""Gates between several residual streams and a part of a layer, on a GPU: one launch each.

Results are rounded where ``gates.py`` rounds. Invariant: a token's results depend on that token alone, to the last bit.

Shape suffixes: as in ``gates.py``; in kernels a row's first index is 1 where all streams have the same.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices, Summand
from strandline.kernels.expert_choices_triton import choices_argument, num_added, sum_of_choices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2
from strandline.kernels.streams.gates import FeatureNorms

ELEMENTS_PER_WARP = 1024
"""Elements of the streams for each warp of a program."""

BLOCK_MIXED, WARPS_MIXED = 512, 2
"""Channels of a program that mixes them, of all streams."""

BLOCK_LOW, WARPS_LOW = 512, 2


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _norm(x_SE, weight_ptr, mask_SE, eps, E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return each stream normalised, with a weight around zero of its own."""
    row_SE = tl.arange(0, BLOCK_S)[:, None] * E + tl.arange(0, BLOCK_E)[None, :]
    weight_SE = tl.load(weight_ptr + row_SE, mask=mask_SE, other=0.0).to(tl.float32)
    normed_SE = x_SE * tl.rsqrt(tl.sum(x_SE * x_SE, axis=1) / E + eps)[:, None]
    return normed_SE + normed_SE * weight_SE


@triton.jit
def _add_kernel(
    stream_ptr,
    next_ptr,
    normed_ptr,
    gate_ptr,
    output_ptr,
    norm_ptr,
    stride_t,
    stride_s,
    stride_gt,
    stride_output,
    eps,
    choices,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a token's streams with the output of a part, and these normalised."""
    dtype = stream_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    stream_S = tl.arange(0, BLOCK_S)
    channel_E = tl.arange(0, BLOCK_E)
    mask_SE = (stream_S < S)[:, None] & (channel_E < E)[None, :]
    out_SE = token * (S * E) + (stream_S * E)[:, None] + channel_E[None, :]
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    x_SE_ptr = stream_ptr + token * stride_t + (stream_S * stride_s)[:, None] + channel_E[None, :]
    x_SE = tl.load(x_SE_ptr, mask=mask_SE, other=0.0).to(tl.float32)
    if next_ptr is not None:
        gate_S = tl.load(gate_ptr + token * stride_gt + stream_S, mask=stream_S < S, other=0.0).to(tl.float32)
        gate_S = _rounded(tl.sigmoid(_rounded(gate_S / S, dtype)), dtype) * 2.0
        if TOP_K > 0:
            token_1 = token + tl.arange(0, 1)
            mask_1E = (token_1 >= 0)[:, None] & (channel_E < E)[None, :]
            output_1E = sum_of_choices(choices, token_1, channel_E, token_1 >= 0, mask_1E, E, TOP_K).to(tl.float32)
        else:
            output_E_ptr = output_ptr + token * stride_output + channel_E
            output_1E = tl.load(output_E_ptr, mask=channel_E < E, other=0.0).to(tl.float32)[None, :]
        x_SE = _rounded(x_SE + _rounded(output_1E * gate_S[:, None], dtype), dtype)
        tl.store(next_ptr + out_SE, x_SE.to(dtype), mask=mask_SE)
    if normed_ptr is not None:
        normed_SE = _norm(x_SE, norm_ptr, mask_SE, eps, E, BLOCK_S, BLOCK_E)
        tl.store(normed_ptr + out_SE, normed_SE.to(dtype), mask=mask_SE)


@triton.jit
def _silu_kernel(low_ptr, out_ptr, stride_t, R, divisor, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index_R = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    dtype = low_ptr.dtype.element_ty
    low_R = tl.load(low_ptr + token * stride_t + index_R, mask=index_R < R, other=0.0).to(tl.float32)
    low_R = _rounded(low_R / divisor, dtype)
    tl.store(out_ptr + token * R + index_R, (low_R * tl.sigmoid(low_R)).to(dtype), mask=index_R < R)


@triton.jit
def _mix_kernel(
    gate_ptr,
    normed_ptr,
    out_ptr,
    stride_gate,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    stream_S = tl.arange(0, BLOCK_S)
    mask_SE = (stream_S < S)[:, None] & (channel_E < E)[None, :]
    index_SE = (stream_S * E)[:, None] + channel_E[None, :]
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    dtype = normed_ptr.dtype.element_ty
    gate_SE = tl.load(gate_ptr + token * stride_gate + index_SE, mask=mask_SE, other=0.0).to(tl.float32)
    normed_SE = tl.load(normed_ptr + token * (S * E) + index_SE, mask=mask_SE, other=0.0).to(tl.float32)
    gated_SE = _rounded(_rounded(tl.sigmoid(gate_SE), dtype) * normed_SE, dtype)
    mean_E = tl.sum(gated_SE, axis=0) / S
    tl.store(out_ptr + token * E + channel_E, mean_E.to(dtype), mask=channel_E < E)


@triton.jit
def _features_kernel(
    key_ptr,
    value_ptr,
    stream_ptr,
    key_norm_ptr,
    stream_norm_ptr,
    gated_norm_ptr,
    gated_ptr,
    normed_ptr,
    stride_key,
    stride_value,
    stride_t,
    stride_s,
    root,
    eps,
    S: tl.constexpr,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream_S = tl.arange(0, BLOCK_S)
    channel_E = tl.arange(0, BLOCK_E)
    mask_SE = (stream_S < S)[:, None] & (channel_E < E)[None, :]
    index_SE = (stream_S * E)[:, None] + channel_E[None, :]
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    dtype = stream_ptr.dtype.element_ty
    key_SE = tl.load(key_ptr + token * stride_key + index_SE, mask=mask_SE, other=0.0).to(tl.float32)
    key_SE = _rounded(_norm(key_SE, key_norm_ptr, mask_SE, eps, E, BLOCK_S, BLOCK_E), dtype)
    x_SE_ptr = stream_ptr + token * stride_t + (stream_S * stride_s)[:, None] + channel_E[None, :]
    x_SE = tl.load(x_SE_ptr, mask=mask_SE, other=0.0).to(tl.float32)
    x_SE = _rounded(_norm(x_SE, stream_norm_ptr, mask_SE, eps, E, BLOCK_S, BLOCK_E), dtype)
    score_S = _rounded(_rounded(tl.sum(_rounded(key_SE * x_SE, dtype), axis=1), dtype) / root, dtype)
    size_S = _rounded(tl.sqrt(tl.maximum(tl.abs(score_S), _rounded(tl.full([], 1e-6, tl.float32), dtype))), dtype)
    signed_S = tl.where(score_S > 0, size_S, tl.where(score_S < 0, -size_S, 0.0))
    gate_S = _rounded(tl.sigmoid(signed_S), dtype)
    value_E = tl.load(value_ptr + token * stride_value + channel_E, mask=channel_E < E, other=0.0).to(tl.float32)
    gated_SE = _rounded(gate_S[:, None] * value_E[None, :], dtype)
    out_SE = token * (S * E) + index_SE
    tl.store(gated_ptr + out_SE, gated_SE.to(dtype), mask=mask_SE)
    normed_SE = _norm(gated_SE, gated_norm_ptr, mask_SE, eps, E, BLOCK_S, BLOCK_E)
    tl.store(normed_ptr + out_SE, normed_SE.to(dtype), mask=mask_SE)


def add_gated(stream_TSE: Tensor, gate_TS: Tensor | None, output: Summand | None) -> Tensor:
    """Triton version of :func:`strandline.kernels.streams.gates.add_gated`."""
    return stream_TSE if gate_TS is None else _add(stream_TSE, gate_TS, output)[1]


def add_gated_norm(
    stream_TSE: Tensor, gate_TS: Tensor | None, output: Summand | None, norm_SE: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Triton version of :func:`strandline.kernels.streams.gates.add_gated_norm`."""
    return _add(stream_TSE, gate_TS, output, norm_SE, eps)


def silu_of_share(low_TR: Tensor, num_streams: int) -> Tensor:
    """Triton version of :func:`strandline.kernels.streams.gates.silu_of_share`."""
    (num_tokens, rank), low_TR = low_TR.shape, _with_dense_rows(low_TR)
    out_TR = torch.empty((num_tokens, rank), dtype=low_TR.dtype, device=low_TR.device)
    if num_tokens:
        _silu_kernel[(num_tokens, cdiv(rank, BLOCK_LOW))](
            low_TR,
            out_TR,
            low_TR.stride(0),
            rank,
            num_streams,
            BLOCK=BLOCK_LOW,
            num_warps=WARPS_LOW,
            **overlap_options(low_TR),
        )
    return out_TR


def mix_gated(gate_TO: Tensor, normed_TSE: Tensor) -> Tensor:
    """Triton version of :func:`strandline.kernels.streams.gates.mix_gated`."""
    gate_TO, (num_tokens, num_streams, num_channels) = _with_dense_rows(gate_TO), normed_TSE.shape
    out_TE = torch.empty((num_tokens, num_channels), dtype=normed_TSE.dtype, device=normed_TSE.device)
    if num_tokens:
        block = min(BLOCK_MIXED, next_power_of_2(num_channels))
        _mix_kernel[(num_tokens, cdiv(num_channels, block))](
            gate_TO,
            normed_TSE,
            out_TE,
            gate_TO.stride(0),
            S=num_streams,
            E=num_channels,
            BLOCK_S=next_power_of_2(num_streams),
            BLOCK_E=block,
            num_warps=WARPS_MIXED,
            **overlap_options(gate_TO),
        )
    return out_TE


def gate_features(
    key_TO: Tensor, value_TE: Tensor, stream_TSE: Tensor, norms: FeatureNorms, eps: float
) -> tuple[Tensor, Tensor]:
    """Triton version of :func:`strandline.kernels.streams.gates.gate_features`."""
    key_TO, value_TE = _with_dense_rows(key_TO), _with_dense_rows(value_TE)
    gated_TSE, normed_TSE = _like(stream_TSE), _like(stream_TSE)
    if len(stream_TSE):
        _features_kernel[(len(stream_TSE),)](
            key_TO,
            value_TE,
            stream_TSE,
            *norms,
            gated_TSE,
            normed_TSE,
            key_TO.stride(0),
            value_TE.stride(0),
            *stream_TSE.stride()[:2],
            stream_TSE.shape[2] ** 0.5,
            eps,
            **_sizes(stream_TSE),
            **overlap_options(stream_TSE),
        )
    return gated_TSE, normed_TSE


def _add(
    stream_TSE: Tensor,
    gate_TS: Tensor | None,
    output: Summand | None,
    norm_SE: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor | None, Tensor]:
    """Return the streams with a part's output, if there is one; before them these normalised, given weights."""
    choices = output if isinstance(output, ExpertChoices) else None
    output_TE = None if gate_TS is None or choices is not None else _with_dense_rows(output)
    next_TSE = None if gate_TS is None else _like(stream_TSE)
    normed_TSE = None if norm_SE is None else _like(stream_TSE)
    if len(stream_TSE):
        _add_kernel[(len(stream_TSE),)](
            stream_TSE,
            next_TSE,
            normed_TSE,
            gate_TS,
            output_TE,
            norm_SE,
            *stream_TSE.stride()[:2],
            0 if gate_TS is None else gate_TS.stride(0),
            0 if output_TE is None else output_TE.stride(0),
            eps,
            choices_argument(choices),
            **_sizes(stream_TSE),
            TOP_K=num_added(choices),
            **overlap_options(stream_TSE),
        )
    return normed_TSE, stream_TSE if next_TSE is None else next_TSE


def _sizes(stream_TSE: Tensor) -> dict[str, int]:
    """Return the sizes of a program that computes all channels of a token, and its warps."""
    _, num_streams, num_channels = stream_TSE.shape
    block_s, block_e = next_power_of_2(num_streams), next_power_of_2(num_channels)
    sizes = {"S": num_streams, "E": num_channels, "BLOCK_S": block_s, "BLOCK_E": block_e}
    return {**sizes, "num_warps": max(4, min(16, block_s * block_e // ELEMENTS_PER_WARP))}


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
