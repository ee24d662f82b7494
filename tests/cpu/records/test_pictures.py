"""Ids and positions of pictures' tokens."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from strandline.records.pictures import (
    PictureSpan,
    is_virtual,
    picture_digest,
    rotary_delta,
    rotary_positions,
    virtual_ids,
)
from strandline.records.tokens import encode, resumable_end

Layout = list[tuple[int, int, int]]
"""Tokens of text, then a picture's rows and columns, and so on."""

layouts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12)), max_size=4)


def spans_of(layout: Layout) -> tuple[PictureSpan, ...]:
    spans, position = [], 0
    for num_text, rows, columns in layout:
        spans.append(PictureSpan(position + num_text, rows, columns, b""))
        position = spans[-1].end
    return tuple(spans)


def reference_positions(layout: Layout, num_last: int) -> tuple[list[list[int]], int]:
    """Return what transformers computes for a prompt that ends with ``num_last`` tokens of text."""
    kinds = [kind for text, rows, columns in layout for kind in [0] * text + [1] * (rows * columns)] + [0] * num_last
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for _, rows, columns in layout]).reshape(-1, 3)
    model = Qwen3_5Model.__new__(Qwen3_5Model)
    torch.nn.Module.__init__(model)
    model.config = Qwen3_5Config()
    positions, delta = model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), image_grid_thw=grids
    )
    return positions[:, 0].tolist(), int(delta)


@given(layouts, st.integers(1, 9), st.data())
def test_rotary_positions_are_those_of_transformers(layout: Layout, num_last: int, data: st.DataObject) -> None:
    expected, delta = reference_positions(layout, num_last)
    spans, num_tokens = spans_of(layout), len(expected[0])
    start = data.draw(st.integers(0, num_tokens))
    end = data.draw(st.integers(start, num_tokens))
    assert [row.tolist() for row in rotary_positions(spans, start, end)] == [row[start:end] for row in expected]
    assert rotary_delta(spans) == delta


@given(layouts, st.integers(1, 9), st.sampled_from([1, 64]), st.data())
def test_no_position_to_resume_is_inside_a_picture(
    layout: Layout, num_last: int, grid_tokens: int, data: st.DataObject
) -> None:
    spans = spans_of(layout)
    tokens = [1] * ((spans[-1].end if spans else 0) + num_last)
    for span in spans:
        tokens[span.start : span.end] = virtual_ids(span.digest, span.rows, span.columns)
    inside = {position for span in spans for position in range(span.start + 1, span.end)}
    position = data.draw(st.integers(0, len(tokens)))
    expected = max(x for x in range(0, position + 1, grid_tokens) if x not in inside)
    assert resumable_end(encode(tokens), position, grid_tokens) == expected


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (22, 40), (128, 128)])
def test_virtual_ids_are_outside_every_vocabulary_and_fit_32_bits(rows: int, columns: int) -> None:
    ids = virtual_ids(b"digest", rows, columns)
    assert len(ids) == rows * columns
    assert all(is_virtual(token_id) and token_id < 2**32 for token_id in ids)
    assert not is_virtual(2**31 - 1)


def test_virtual_ids_differ_by_pixels_and_shape() -> None:
    pixels = random.Random(0).randbytes(64 * 32 * 3)
    changed = bytes([pixels[0] ^ 1]) + pixels[1:]
    digests = [picture_digest(pixels, 64, 32), picture_digest(pixels, 32, 64), picture_digest(changed, 64, 32)]
    firsts = [virtual_ids(digest, 2, 1)[0] for digest in digests]
    for left, right in itertools.combinations(firsts, 2):
        assert left != right
    assert virtual_ids(digests[0], 2, 1) == virtual_ids(picture_digest(pixels, 64, 32), 2, 1)
