"""Draws of synthetic acceptance: uniform, independent of each other, and the same whenever they are made."""

import statistics

import pytest

from strandline.device.steps.host_step import draw
from strandline.speculative_config import MAX_DRAFT_TOKENS

NUM_DRAWS = 4000


@pytest.mark.parametrize("seed", [0, 1, -5, 2**64 - 1])
def test_draws_are_uniform_and_independent(seed: int) -> None:
    places = [[draw(seed, step * MAX_DRAFT_TOKENS + index) for step in range(NUM_DRAWS)] for index in range(3)]
    for draws in places:
        assert all(0 <= value < 1 for value in draws)
        tenths = [sum(int(10 * value) == tenth for value in draws) / NUM_DRAWS for tenth in range(10)]
        # Five standard deviations of a tenth are 0.024.
        assert tenths == pytest.approx([0.1] * 10, abs=0.024)
        assert abs(statistics.correlation(draws[:-1], draws[1:])) < 5 / NUM_DRAWS**0.5
    for other in (places[1], places[2], [draw(seed + 1, step * MAX_DRAFT_TOKENS) for step in range(NUM_DRAWS)]):
        assert abs(statistics.correlation(places[0], other)) < 5 / NUM_DRAWS**0.5


def test_draws_depend_on_seed_and_index_alone() -> None:
    assert draw(3, 1) == draw(3, 1)
    assert len({draw(3, 1), draw(4, 1), draw(3, 2), draw(4, 2)}) == 4
