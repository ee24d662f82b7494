"""Recurrences of numbers per channel in segments: the same as token by token, wherever a prompt is resumed.

Prompts have as many segments as chunks, a few at most. Shape suffixes as in ``test_recurrences_triton.py``.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import Chunks, build_chunk_table
from strandline.kernels.operation import Launches
from tests.cpu.kernels.recurrences.test_chunkwise import Kind, Prompt
from tests.cpu.kernels.recurrences.test_recurrences_triton import (
    FLOAT32_ERROR,
    KINDS,
    Layer,
    check_prefill,
    error,
    make_layer,
    make_slots,
    slots_of,
    version,
)
from tests.poison import poisoned_memory

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

NAMES = ("rglru", "mamba1")
MODULES = {"rglru": "rglru_triton", "mamba1": "mamba1_prefill_triton"}
NUM_TOKENS = 150


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    module = import_module(f"strandline.kernels.recurrences.{MODULES[request.param]}")
    monkeypatch.setattr(module, "LAUNCH", module.LAUNCH._replace(rows=3))
    monkeypatch.setattr(module, "DIVISION", module.DIVISION._replace(min_chunks=1))
    return KINDS[request.param]


def run(layer: Layer, state_SX: Tensor, prompt: Prompt, launches: Launches = Launches.MEASURED) -> Tensor:
    table = build_chunk_table([(prompt.start, prompt.end)], [prompt.cuts])
    with poisoned_memory():
        prefill = version(layer.kind.prefill, launches)
        out_T: Tensor = prefill(layer.inputs, state_SX, slots_of([prompt], "cpu"), table)
    return out_T


@pytest.mark.parametrize("num_tokens", [64, 128, 129, 191, 257])
def test_lengths_around_chunks_equal_torchs(kind: Kind, num_tokens: int) -> None:
    layer, state_SX = make_layer(kind, num_tokens, torch.float32, "cpu"), make_slots(kind, [2], "cpu")
    check_prefill(layer, state_SX, [Prompt(0, num_tokens, 2, 2)], FLOAT32_ERROR)


def test_sequences_of_different_lengths_equal_torchs(kind: Kind) -> None:
    prompts = [
        Prompt(0, 200, src=0, dst=1, cuts=((64, 2), (65, 3), (150, 4))),
        Prompt(100, 101, src=5, dst=6),
        Prompt(60, 130, src=5, dst=7, cuts=((128, 8),)),
        Prompt(63, 66, src=9, dst=9),
    ]
    layer = make_layer(kind, sum(p.end - p.start for p in prompts), torch.float32, "cpu")
    check_prefill(layer, make_slots(kind, [5, 9], "cpu"), prompts, FLOAT32_ERROR)


OFFSETS = [1, 64, 65, 149]
EVERY_OFFSET = [
    pytest.param(offset, marks=[] if offset in OFFSETS else pytest.mark.long) for offset in range(1, NUM_TOKENS)
]


@pytest.mark.parametrize("offset", EVERY_OFFSET)
def test_resumed_at_any_offset_equals_uncached(kind: Kind, offset: int) -> None:
    layer, state_SX = make_layer(kind, NUM_TOKENS, torch.float32, "cpu"), make_slots(kind, [], "cpu")

    def part(prompt: Prompt, launches: Launches = Launches.MEASURED) -> Tensor:
        return run(layer.rows(prompt.start, prompt.end), state_SX, prompt, launches)

    whole_T = part(Prompt(0, NUM_TOKENS, 0, 1))
    cut_T = part(Prompt(0, NUM_TOKENS, 0, 2, ((offset, 3),)))
    resumed_T = part(Prompt(offset, NUM_TOKENS, 3, 4))
    assert error(cut_T, whole_T) <= FLOAT32_ERROR
    assert error(resumed_T, whole_T[offset:]) <= FLOAT32_ERROR
    assert error(state_SX[4], state_SX[1]) <= FLOAT32_ERROR
    one_T = part(Prompt(0, NUM_TOKENS, 0, 5, ((offset, 6),)), Launches.FIXED)
    assert torch.equal(part(Prompt(offset, NUM_TOKENS, 6, 7), Launches.FIXED), one_T[offset:])
    assert torch.equal(state_SX[7], state_SX[5])


def test_sequences_without_chunks_and_empty_chunks_change_nothing(kind: Kind) -> None:
    layer, state_SX = make_layer(kind, 130, torch.float32, "cpu"), make_slots(kind, [1], "cpu")
    plain_SX, slots = state_SX.clone(), Slots(torch.tensor([1, 0, 0]), torch.tensor([2, 0, 0]))
    columns = ((0, 4, 4, 4), (0, 64, 128, 130, 130, 130), (64, 64, 2, 0, 0, 0), (0, 3, 0, 0, 0, 0))
    table = Chunks(*columns).with_tensors([torch.tensor(column) for column in columns])
    with poisoned_memory():
        out_T = version(kind.prefill)(layer.inputs, state_SX, slots, table)
    expected_T = run(layer, plain_SX, Prompt(0, 130, 1, 2, ((128, 3),)))
    assert error(out_T, expected_T) <= FLOAT32_ERROR
    assert error(state_SX[2:4], plain_SX[2:4]) <= FLOAT32_ERROR
    assert torch.equal(state_SX[4:].nan_to_num(9.0), plain_SX[4:].nan_to_num(9.0))
    assert torch.equal(state_SX[:1].nan_to_num(9.0), plain_SX[:1].nan_to_num(9.0))


def test_a_strong_decay_in_one_segment_leaves_numbers(kind: Kind) -> None:
    layer, state_SX = make_layer(kind, 200, torch.float32, "cpu"), make_slots(kind, [1], "cpu")
    for tokens in layer.tokens:
        tokens[70:120] = 300.0
    check_prefill(layer, state_SX, [Prompt(0, 200, 1, 2, ((128, 3),))], FLOAT32_ERROR)
