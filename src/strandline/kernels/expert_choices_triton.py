"""Weighted sums of what experts made of each token's choices, on a GPU.

Invariant: what is added up, in which order and with which rounding depends on the token alone, so that kernels which
add up choices for themselves get the same bits as ``add_choices``.

Shape suffixes: as in ``moe.py``; in kernels R tokens and N channels of a program.
"""
# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.expert_choices import ExpertChoices
from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv

BLOCK_SUM, WARPS_SUM = 512, 2
"""Channels of a program: 16 bytes per thread and choice."""


class ChoicesArgument(NamedTuple):
    """Choices as one argument of a kernel, which also takes ``TOP_K``."""

    out_ptr: Tensor
    weights_ptr: Tensor
    experts_ptr: Tensor
    shared_ptr: Tensor | None
    shared_gate_ptr: Tensor | None
    stride_shared: int
    stride_gate: int
    held: tuple[int, int] | None
    """The first expert of this rank and how many it has; None: all."""


@triton.jit
def sum_of_choices(choices, token_R, channel_N, is_token_R, mask_RN, D, TOP_K: tl.constexpr):
    """Return tokens' weighted sums of choices, and of the gated shared expert, in the choices' dtype.

    Args:
        choices: a ``ChoicesArgument``.
        token_R: int64.
        mask_RN: where results are needed; covers ``is_token_R``.
    """
    dtype = choices.out_ptr.dtype.element_ty
    if choices.shared_ptr is not None:
        shared_RN_ptr = choices.shared_ptr + token_R[:, None] * choices.stride_shared + channel_N[None, :]
        shared_RN = tl.load(shared_RN_ptr, mask=mask_RN, other=0.0).to(tl.float32)
        if choices.shared_gate_ptr is not None:
            gate_R_ptr = choices.shared_gate_ptr + token_R * choices.stride_gate
            gate_R = tl.load(gate_R_ptr, mask=is_token_R, other=0.0).to(tl.float32)
            shared_RN *= tl.sigmoid(gate_R).to(dtype).to(tl.float32)[:, None]
    sum_RN = tl.zeros(mask_RN.shape, dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        choice_R = token_R * TOP_K + choice
        weight_R = tl.load(choices.weights_ptr + choice_R, mask=is_token_R, other=0.0).to(tl.float32)
        is_added_RN = mask_RN
        if choices.held is not None:
            first_expert, num_held = choices.held
            expert_R = tl.load(choices.experts_ptr + choice_R, mask=is_token_R, other=-1) - first_expert
            is_added_RN = mask_RN & ((expert_R >= 0) & (expert_R < num_held))[:, None]
        choice_RN_ptr = choices.out_ptr + choice_R[:, None] * D + channel_N[None, :]
        choice_RN = tl.load(choice_RN_ptr, mask=is_added_RN, other=0.0, eviction_policy="evict_first")
        sum_RN += choice_RN.to(tl.float32) * weight_R[:, None]
    if choices.shared_ptr is not None:
        sum_RN = sum_RN.to(dtype).to(tl.float32) + shared_RN
    return sum_RN.to(dtype)


@triton.jit
def _add_kernel(sum_ptr, choices, D, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr):
    token_R = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    channel_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_RN = (token_R >= 0)[:, None] & (channel_N < D)[None, :]
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    sum_RN = sum_of_choices(choices, token_R, channel_N, token_R >= 0, mask_RN, D, TOP_K)
    tl.store(sum_ptr + token_R[:, None] * D + channel_N[None, :], sum_RN, mask=mask_RN)


def add_choices(choices: ExpertChoices) -> Tensor:
    """Return the weighted sum of each token's choices, and of the gated shared expert."""
    sum_TD = torch.empty_like(choices.like_sum)
    num_tokens, num_channels = sum_TD.shape
    _add_kernel[(num_tokens, cdiv(num_channels, BLOCK_SUM))](
        sum_TD,
        choices_argument(choices),
        num_channels,
        TOP_K=num_added(choices),
        BLOCK_N=BLOCK_SUM,
        num_warps=WARPS_SUM,
        **overlap_options(sum_TD),
    )
    return sum_TD


def choices_argument(choices: ExpertChoices | None) -> ChoicesArgument | None:
    """Return choices as kernels take them; None: a kernel takes a tensor instead."""
    if choices is None:
        return None
    shared_TD, gate_T1, held = choices.shared_TD, choices.shared_gate_T1, choices.held
    return ChoicesArgument(
        choices.out_AD,
        choices.weights_TK,
        choices.experts_TK,
        shared_TD,
        gate_T1,
        0 if shared_TD is None else shared_TD.stride(0),
        0 if gate_T1 is None else gate_T1.stride(0),
        None if held is None else (held.start, len(held)),
    )


def num_added(choices: ExpertChoices | None) -> int:
    """Return ``TOP_K``, how many choices a token has; 0: a kernel takes a tensor instead."""
    return 0 if choices is None else choices.weights_TK.shape[1]
