"""Lists of every expert's choices, on a GPU: stable, as a sort would give them, without sorting.

Few choices: one program per expert looks at all of them. More: blocks of choices are counted by expert; then every
block finds from all blocks' counts where its choices belong.

Shape suffixes: as in ``moe.py``; in kernels B blocks of choices, J choices of the same block.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from strandline.kernels.overlap_triton import overlap_options, release_next, wait_for_previous
from strandline.kernels.sizes import cdiv, next_power_of_2

MAX_CHOICES_DIRECT = 8192
"""Up to here one launch, whose programs each look at all choices, is faster than two."""

BLOCK_DIRECT = 2048
"""Choices that the program of an expert looks at together."""

BLOCK_CHOICES = 512
"""Choices of a block: each is compared with all of its block."""

BLOCK_COUNTS = 32
"""Blocks whose counts are added up together."""

BLOCK_PEERS = 32
"""Choices that a block's are compared with together."""


@triton.jit(do_not_specialize=["num_choices"])
def _list_kernel(
    experts_ptr,
    starts_ptr,
    choices_ptr,
    num_choices,
    first_expert,
    BLOCK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """List one expert's choices, in their order, after those of the experts before it.

    Args:
        IS_WHOLE: whether a block has all choices: they are loaded once.
    """
    expert = first_expert + tl.program_id(0)
    wait_for_previous(OVERLAPS)
    release_next(OVERLAPS)
    if IS_WHOLE:
        expert_A = _load_block(experts_ptr, 0, num_choices, BLOCK)
        start = tl.sum(((expert_A >= first_expert) & (expert_A < expert)).to(tl.int32), axis=0)
        end = _list_block(expert_A, choices_ptr, expert, 0, start)
    else:
        num_before = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, num_choices, BLOCK):
            expert_A = _load_block(experts_ptr, first, num_choices, BLOCK)
            num_before += ((expert_A >= first_expert) & (expert_A < expert)).to(tl.int32)
        start = tl.sum(num_before, axis=0)
        end = start
        for first in range(0, num_choices, BLOCK):
            expert_A = _load_block(experts_ptr, first, num_choices, BLOCK)
            end = _list_block(expert_A, choices_ptr, expert, first, end)
    tl.store(starts_ptr + tl.program_id(0), start)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(starts_ptr + tl.num_programs(0), end)


@triton.jit
def _load_block(experts_ptr, first, num_choices, BLOCK: tl.constexpr):
    """Load the experts of a block of choices; after the last one, a number that no expert has."""
    choice_A = first + tl.arange(0, BLOCK)
    return tl.load(experts_ptr + choice_A, mask=choice_A < num_choices, other=0x7FFFFFFF)


@triton.jit
def _list_block(expert_A, choices_ptr, expert, first, start):
    """List an expert's choices of a block from index ``start`` on, and return where they end."""
    is_mine_A = (expert_A == expert).to(tl.int32)
    index_A = start + tl.cumsum(is_mine_A, axis=0) - 1
    tl.store(choices_ptr + index_A, first + tl.arange(0, expert_A.shape[0]), mask=is_mine_A > 0)
    return start + tl.sum(is_mine_A, axis=0)


@triton.jit(do_not_specialize=["num_choices"])
def _count_kernel(experts_ptr, counts_ptr, num_choices, first_expert, E, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """Count a block's choices of each expert."""
    block = tl.program_id(0)
    choice_A = block * BLOCK + tl.arange(0, BLOCK)
    expert_A = tl.load(experts_ptr + choice_A, mask=choice_A < num_choices, other=-1).to(tl.int32) - first_expert
    is_held_A = (expert_A >= 0) & (expert_A < E)
    count_E = tl.histogram(tl.where(is_held_A, expert_A, 0), BLOCK_E, mask=is_held_A)
    expert_E = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + block * E + expert_E, count_E, mask=expert_E < E)


@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def _scatter_kernel(
    experts_ptr,
    counts_ptr,
    starts_ptr,
    choices_ptr,
    num_choices,
    num_blocks,
    first_expert,
    E,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Put a block's choices where they belong."""
    block = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK_E)
    total_BE = tl.zeros([BLOCK_B, BLOCK_E], dtype=tl.int32)
    before_BE = tl.zeros([BLOCK_B, BLOCK_E], dtype=tl.int32)
    # Added up at the end: sums over blocks need all warps to wait.
    for first in range(0, num_blocks, BLOCK_B):
        block_B = first + tl.arange(0, BLOCK_B)
        mask_BE = (block_B < num_blocks)[:, None] & (expert_E < E)[None, :]
        count_BE = tl.load(counts_ptr + block_B[:, None] * E + expert_E[None, :], mask=mask_BE, other=0)
        total_BE += count_BE
        before_BE += tl.where((block_B < block)[:, None], count_BE, 0)
    total_E, before_E = tl.sum(total_BE, axis=0), tl.sum(before_BE, axis=0)
    start_E = tl.cumsum(total_E, axis=0) - total_E
    if block == 0:
        tl.store(starts_ptr + expert_E, start_E, mask=expert_E < E)
        tl.store(starts_ptr + E, tl.sum(total_E, axis=0))
    offset_A = tl.arange(0, BLOCK)
    choice_A = block * BLOCK + offset_A
    expert_A = tl.load(experts_ptr + choice_A, mask=choice_A < num_choices, other=-1).to(tl.int32) - first_expert
    is_held_A = (expert_A >= 0) & (expert_A < E)
    index_A = tl.gather(start_E + before_E, tl.where(is_held_A, expert_A, 0), 0)
    for first in range(0, BLOCK, BLOCK_J):
        offset_J = first + tl.arange(0, BLOCK_J)
        choice_J = block * BLOCK + offset_J
        expert_J = tl.load(experts_ptr + choice_J, mask=choice_J < num_choices, other=-1).to(tl.int32) - first_expert
        # In this order a thread holds all peers of a choice: it adds them up alone.
        is_before_JA = (expert_J[:, None] == expert_A[None, :]) & (offset_J[:, None] < offset_A[None, :])
        index_A += tl.sum(is_before_JA.to(tl.int32), axis=0)
    tl.store(choices_ptr + index_A, choice_A, mask=is_held_A)


def list_choices(experts_TK: Tensor, num_experts: int, first_expert: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``(starts_E, choices_A)``: expert ``e``'s choices are ``choices_A[starts_E[e] : starts_E[e + 1]]``.

    Experts are counted from ``first_expert`` on; choices of others are not listed.
    """
    num_choices = experts_TK.numel()
    starts_E = torch.empty(num_experts + 1, dtype=torch.int32, device=experts_TK.device)
    choices_A = torch.empty(num_choices, dtype=torch.int32, device=experts_TK.device)
    if num_choices <= MAX_CHOICES_DIRECT:
        block = min(BLOCK_DIRECT, next_power_of_2(num_choices))
        options = overlap_options(experts_TK)
        arguments = (experts_TK, starts_E, choices_A, num_choices, first_expert)
        _list_kernel[(num_experts,)](*arguments, BLOCK=block, IS_WHOLE=num_choices <= block, num_warps=4, **options)
        return starts_E, choices_A
    num_blocks = cdiv(num_choices, BLOCK_CHOICES)
    counts_BE = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=experts_TK.device)
    block_e = next_power_of_2(num_experts)
    _count_kernel[(num_blocks,)](
        experts_TK,
        counts_BE,
        num_choices,
        first_expert,
        num_experts,
        BLOCK_E=block_e,
        BLOCK=BLOCK_CHOICES,
        num_warps=4,
    )
    _scatter_kernel[(num_blocks,)](
        experts_TK,
        counts_BE,
        starts_E,
        choices_A,
        num_choices,
        num_blocks,
        first_expert,
        num_experts,
        BLOCK_E=block_e,
        BLOCK=BLOCK_CHOICES,
        BLOCK_B=BLOCK_COUNTS,
        BLOCK_J=BLOCK_PEERS,
        num_warps=8,
    )
    return starts_E, choices_A
