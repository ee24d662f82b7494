"""Kernels whose programs choose one expert of a token each, as those of the experts' first product do."""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.experts.router import Routing
from strandline.kernels.experts.router_triton import choice_options, choose_nth, choose_nth_by_warp


@triton.jit
def _nth_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    stride_t,
    E,
    ROUTING: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0)
    index = tl.program_id(1)
    expert = choose_nth(logits_ptr + token * stride_t, bias_ptr, E, index, ROUTING, BLOCK_G, BLOCK_I)
    tl.store(experts_ptr + token * tl.num_programs(1) + index, expert.to(tl.int64))


def experts_one_by_one(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> Tensor:
    """Return each token's experts."""
    num_tokens, num_experts = logits_TE.shape
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    experts_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=logits_TE.device)
    arguments = (logits_TE, bias_E, experts_TK, logits_TE.stride(0), num_experts)
    _nth_kernel[(num_tokens, routing.top_k)](*arguments, **choice_options(routing, num_experts), num_warps=1)
    return experts_TK


@triton.jit
def _nth_by_warp_kernel(logits_ptr, experts_ptr, E, stride_t: tl.constexpr, BLOCK_I: tl.constexpr, WARPS: tl.constexpr):
    token = tl.program_id(0)
    index = tl.program_id(1)
    expert = choose_nth_by_warp(logits_ptr + token * stride_t, E, index, BLOCK_I, WARPS)
    tl.store(experts_ptr + token * tl.num_programs(1) + index, expert.to(tl.int64))


def experts_by_warp(logits_TE: Tensor, routing: Routing, num_warps: int) -> Tensor:
    """Return each token's experts, chosen by programs of some warps; only where ``can_choose_by_warp`` says so."""
    num_tokens, num_experts = logits_TE.shape
    experts_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=logits_TE.device)
    block_i = choice_options(routing, num_experts)["BLOCK_I"]
    options = {"BLOCK_I": block_i, "WARPS": num_warps, "num_warps": num_warps}
    _nth_by_warp_kernel[(num_tokens, routing.top_k)](logits_TE, experts_TK, num_experts, logits_TE.stride(0), **options)
    return experts_TK
