"""Sizes to which pictures are scaled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from strandline.errors import RequestError
from strandline.pictures.sizes import resized_size

LIMITS = (32, 65536, 16777216)
sides = st.one_of(st.integers(1, 400), st.integers(1, 9000))


@given(sides, sides, st.sampled_from([256, 1024, 4096, 16384]))
def test_sizes_are_those_of_transformers(height: int, width: int, max_tokens: int) -> None:
    max_pixels = max_tokens * 1024
    try:
        expected = smart_resize(height, width, 32, 65536, max_pixels)
    except ValueError:
        with pytest.raises(RequestError, match="at most 200 times"):
            resized_size(height, width, 32, 65536, max_pixels)
        return
    assert resized_size(height, width, 32, 65536, max_pixels) == expected


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(16, 16, 64), (640, 480, 300), (1280, 720, 880), (1920, 1080, 2040), (100, 20, 72), (6000, 4000, 16224)],
)
def test_pictures_have_the_published_numbers_of_tokens(width: int, height: int, tokens: int) -> None:
    new_height, new_width = resized_size(height, width, *LIMITS)
    assert new_height * new_width == 1024 * tokens


@given(sides, sides, st.integers(1, 300))
def test_no_picture_has_more_tokens_than_the_limit(height: int, width: int, max_tokens: int) -> None:
    if max(height, width) <= 200 * min(height, width):
        new_height, new_width = resized_size(height, width, 32, 65536, max_tokens * 1024)
        assert 1024 <= new_height * new_width <= max_tokens * 1024
        assert new_height % 32 == new_width % 32 == 0
