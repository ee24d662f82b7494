"""Tiles of experts are chosen by how many choices an expert has on average."""

import pytest
import torch

from strandline.kernels.experts.many_launches import (
    CHOICES_PER_EXPERT_MIDDLE,
    CHOICES_PER_EXPERT_PREFILL,
    CHOICES_PER_EXPERT_SEVERAL,
    choose_launches,
    pays_to_dequantize,
)
from strandline.kernels.gemm.formats.fp4 import FP4
from strandline.kernels.gemm.formats.mxfp8 import MXFP8
from strandline.kernels.operation import Launches
from tests.cpu.kernels.gemm.formats import ALL_FORMATS

MEASURED = {format: format.launches.experts for format in ALL_FORMATS}


@pytest.mark.parametrize(
    ("num_choices", "expected"),
    [
        (0, "decode"),
        (CHOICES_PER_EXPERT_SEVERAL - 1, "decode"),
        (CHOICES_PER_EXPERT_SEVERAL, "several"),
        (CHOICES_PER_EXPERT_MIDDLE - 1, "several"),
        (CHOICES_PER_EXPERT_MIDDLE, "middle"),
        (CHOICES_PER_EXPERT_PREFILL - 1, "middle"),
        (CHOICES_PER_EXPERT_PREFILL, "prefill"),
    ],
)
def test_larger_tiles_begin_at_their_number_of_choices(num_choices: int, expected: str) -> None:
    for format, measured in MEASURED.items():
        assert choose_launches(format, torch.bfloat16, num_choices) == (getattr(measured, expected) or measured.decode)


def test_experts_without_a_gate_have_prefill_tiles_of_their_own() -> None:
    for format, measured in MEASURED.items():
        for launches in Launches:
            chosen = choose_launches(format, torch.bfloat16, CHOICES_PER_EXPERT_PREFILL, launches, is_gated=False)
            gated = measured.fixed[2] if launches is Launches.FIXED else measured.prefill
            assert chosen == (measured.prefill_ungated or gated)


def test_weights_of_codes_of_floats_are_dequantised_for_many_choices() -> None:
    for format, measured in MEASURED.items():
        least = measured.min_dequantized
        if least is None:
            assert format not in (FP4, MXFP8)
            assert not pays_to_dequantize(format, 1 << 20, Launches.MEASURED)
        else:
            assert pays_to_dequantize(format, least, Launches.MEASURED)
            assert not pays_to_dequantize(format, least - 1, Launches.MEASURED)
        assert not pays_to_dequantize(format, 1 << 20, Launches.FIXED)
