"""Tiles of experts are chosen by how many choices an expert has on average."""

import pytest

from strandline.kernels.experts.expert_tiles import (
    CHOICES_PER_EXPERT_MIDDLE,
    CHOICES_PER_EXPERT_PREFILL,
    choose_by_load,
)


@pytest.mark.parametrize(
    ("num_choices", "expected"),
    [
        (0, "decode"),
        (CHOICES_PER_EXPERT_MIDDLE - 1, "decode"),
        (CHOICES_PER_EXPERT_MIDDLE, "middle"),
        (CHOICES_PER_EXPERT_PREFILL - 1, "middle"),
        (CHOICES_PER_EXPERT_PREFILL, "prefill"),
    ],
)
def test_larger_tiles_begin_at_their_number_of_choices(num_choices: int, expected: str) -> None:
    assert choose_by_load(num_choices, "decode", "middle", "prefill") == expected
