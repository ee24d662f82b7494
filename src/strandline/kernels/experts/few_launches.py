"""How the two products of experts of a few tokens are tiled, by the weights' format, and for how many tokens.

Launches of quantised weights are in the rows of formats (``gemm/formats``), those of dense ones here, measured in the
same way.
"""

from typing import Final

from strandline.kernels.experts.moe import ExpertWeights, SharedExpert
from strandline.kernels.gemm.formats.launches import few_pair
from strandline.kernels.launch import Launch, Pair
from strandline.kernels.sizes import NUM_SMS, cdiv, next_power_of_2

MAX_TOKENS_FEW: Final = 4
"""With more tokens, reading an expert's weights once per choice costs more than sorting the choices into a list."""

MAX_CHOICES_FEW: Final = 16
"""With more choices of a token, programs that derive them all from the logits take longer than a launch."""

MAX_ELEMENTS_DOWN: Final = 32768
"""Most numbers of a row of the second product: 64 KiB."""

ELEMENTS_DOWN: Final = 16384
"""Numbers of the experts' weights, and of the shared one's, that a program of the second product with dense weights
holds if a row of the output has no more: 32 KiB."""

WARPS_DOWN: Final = 4
MAX_WARPS: Final = 16

BLOCKS_DIVIDED: Final = 2
"""For several tokens and some of the experts, a program of the second product holds two of these in turn."""

UP: Final = (4, 512, 2)
UP_RELU: Final = (4, 512, 1)
UP_ONE: Final = (4, 1024, 2)
UP_ONE_RELU: Final = (4, 1024, 1)
"""Outputs, inputs at a time and warps of a program of the first product; for one token and all experts."""

FEW_INPUTS: Final = 8 * 512
"""Inputs of an output of the second product, those of all choices of a token, for which the table is measured."""

PROGRAMS_AT_ONCE: Final = 3 * NUM_SMS
"""Programs of ``few_experts_three`` that an H200 runs at once: it has registers for three on a multiprocessor."""

WIDE_FACTOR: Final = 4
"""Launches of more inputs (``few_experts_wide``) are measured for this many times as many."""


def choose_few(experts: ExpertWeights, shared: SharedExpert | None, num_tokens: int, top_k: int) -> Pair | None:
    """Return the launches; None: this way is no faster."""
    is_gated = experts.activation.is_gated
    shared_size = 0 if shared is None else shared.num_projected // (1 + is_gated)
    sizes = (top_k, experts.down.shape[2], shared_size)
    launches = experts.down.format.launches
    if launches.few_experts is not None:
        up, down = launches.few_experts[num_tokens > 1]
        in_turn = launches.few_experts_three if num_tokens == 3 else None
        if in_turn is not None:
            programs = num_tokens * cdiv(experts.down.shape[1], in_turn.block_n * in_turn.blocks)
            down = in_turn if programs <= PROGRAMS_AT_ONCE else down
        return up, _with_registers(down, _inputs_down(*sizes), launches.few_experts_wide)
    return choose_dense(num_tokens, *sizes, is_gated=is_gated, is_divided=experts.held is not None)


def _inputs_down(top_k: int, size: int, shared_size: int) -> int:
    """Return how many inputs of an output a program of the second product holds."""
    return max(next_power_of_2(top_k) * next_power_of_2(size), next_power_of_2(max(1, shared_size)))


def _with_registers(down: Launch, num_inputs: int, wide: Launch | None) -> Launch:
    """Return a launch of fewer outputs, and then of more warps: threads hold no more than where it was measured."""
    factor = max(1, num_inputs // FEW_INPUTS)
    if factor > 1 and wide is not None:
        down, factor = wide, max(1, factor // WIDE_FACTOR)
    warps = down.warps * max(1, factor // down.block_n)
    return down._replace(block_n=max(1, down.block_n // factor), warps=min(MAX_WARPS, warps))


def choose_dense(
    num_tokens: int, top_k: int, size: int, shared_size: int, *, is_gated: bool, is_divided: bool = False
) -> Pair | None:
    """Return the launches for dense experts of a size, and a shared one of another, or 0; None: this way is no faster.

    Programs of the first product hold 4 to 8 KiB at a time.

    Args:
        is_divided: whether other ranks have some of the experts.
    """
    largest = _inputs_down(top_k, size, shared_size)
    if top_k > MAX_CHOICES_FEW or largest > MAX_ELEMENTS_DOWN:
        return None
    block_down_n = min(16, max(1, ELEMENTS_DOWN // largest))
    warps_down = WARPS_DOWN * max(1, largest // ELEMENTS_DOWN)
    up, up_relu = (UP_ONE, UP_ONE_RELU) if num_tokens == 1 and not is_divided else (UP, UP_RELU)
    blocks_down = BLOCKS_DIVIDED if is_divided and num_tokens > 1 else 1
    return few_pair(up if is_gated else up_relu, block_down_n, warps_down, blocks_down)
