"""Hits of prompts with pictures: never past a picture that differs, and answers are those of a cold engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline import LLM
from tests.cpu.device.picture_driver import Prompt, random_picture, text
from tests.cpu.engine.conftest import llm_maker
from tests.cpu.engine.vision_engine import Asked, save_vision_model

SHAPES = [(1, 1), (3, 7), (6, 2), (8, 9)]

Pieces = list[tuple[int, int]]
"""A number of tokens of text, then a picture's shape; again and again."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """Engines with a cache and without one."""
    directory: Path = save_vision_model("qwen3_5-vision", tmp_path_factory.mktemp("vision"))
    with pytest.MonkeyPatch.context() as patch:
        make = llm_maker(directory, patch, device="cpu", max_num_batched_tokens=96)
        yield make(), make(enable_prefix_caching=False)


def answer(llm: LLM, prompt: Prompt, salt: str) -> tuple[list[int], int]:
    asked = Asked(llm)
    asked.add("asked", prompt, 3, salt)
    asked.run()
    return asked.answers["asked"], asked.hit_tokens("asked")


def prompt_of(pieces: Pieces, seeds: list[int]) -> Prompt:
    parts = [
        part
        for index, ((num_tokens, shape), seed) in enumerate(zip(pieces, seeds, strict=True))
        for part in (text(num_tokens, index), random_picture(*SHAPES[shape], seed))
    ]
    return Prompt.of(*parts, text(5, 99))


@settings(max_examples=settings().max_examples // 3)
@given(st.data())
def test_hits_end_before_a_picture_that_differs(engines: tuple[LLM, LLM], data: st.DataObject) -> None:
    warm, cold = engines
    pieces = data.draw(st.lists(st.tuples(st.integers(1, 70), st.integers(0, len(SHAPES) - 1)), min_size=1, max_size=4))
    seeds = data.draw(st.lists(st.integers(0, 1), min_size=len(pieces), max_size=len(pieces)))
    changed = data.draw(st.integers(0, len(pieces) - 1))
    other = [2 if index == changed else seed for index, seed in enumerate(seeds)]
    salt = str((pieces, seeds, changed))
    first, second = prompt_of(pieces, seeds), prompt_of(pieces, other)
    found, _ = answer(warm, first, salt)
    assert found == answer(cold, first, salt)[0]
    found, num_hit = answer(warm, second, salt)
    assert num_hit <= second.spans[changed].start
    assert not any(span.start < num_hit < span.end for span in second.spans)
    assert found == answer(cold, second, salt)[0]
    again, num_hit = answer(warm, second, salt)
    assert (again, num_hit) == (found, len(second.token_ids))
