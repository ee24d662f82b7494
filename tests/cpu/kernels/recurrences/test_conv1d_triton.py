"""The Triton convolution against the torch version: outputs, final windows, windows at cuts, and nothing else.

The ``check_`` functions run on any device; tests/gpu runs them at the published models' shapes. Shape suffixes as in
``kernels/recurrences/conv1d.py``.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import Chunks, build_chunk_table
from strandline.kernels.recurrences import conv1d
from strandline.kernels.recurrences.conv1d import Activation, Convolution
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.recurrences.conv1d_triton import causal_conv1d_prefill, causal_conv1d_update

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

FLOAT32_RATIO = 1e-6
"""W products of values near 1, added in another order."""

BFLOAT16_RATIO = {"cpu": 2e-2, "cuda": 4e-3}
"""Equal but for sums whose rounding flips; Triton's interpreter cuts off instead of rounding, twice."""

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = 10
"""Rows of a window's memory: more than the filter needs, so that the others are seen to stay."""


@dataclass(frozen=True)
class Prompt:
    """One sequence of a step: its token range, where its window comes from and goes to, and its cuts."""

    start: int
    end: int
    src: int
    dst: int
    cuts: tuple[tuple[int, int], ...] = ()


MIXED = [
    Prompt(37, 38, src=1, dst=1, cuts=((38, 17),)),
    Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (2, 18), (3, 19), (64, 4), (65, 5), (130, 6))),
    Prompt(64, 66, src=7, dst=8, cuts=((65, 9),)),
    Prompt(63, 128, src=7, dst=10),
    Prompt(5, 8, src=7, dst=11, cuts=((6, 12), (8, 13))),
    Prompt(0, 1, src=0, dst=14),
    Prompt(0, 2, src=7, dst=0, cuts=((1, 15),)),
    Prompt(100, 163, src=16, dst=16, cuts=((101, 20), (102, 21))),
    Prompt(3, 5, src=22, dst=22),
]
"""Sequences of every kind: short of a window or not, in place or from a shared slot, with cuts at every distance."""


def make_tokens(num_tokens: int, channels: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return a part of the rows of a wider tensor whose other columns are NaN."""
    wide = torch.full((num_tokens, channels + 48), torch.nan, dtype=dtype, device=device)
    wide[:, 16 : 16 + channels].normal_()
    return wide[:, 16 : 16 + channels]


def make_arena(
    num_slots: int, filled: Sequence[int], channels: int, dtype: torch.dtype, device: str, num_rows: int = NUM_ROWS
) -> Tensor:
    """Return the strided view of one layer's windows: NaN everywhere but in the filled slots."""
    arena_SX = torch.full((num_slots, num_rows * channels + 96), torch.nan, dtype=dtype, device=device)
    window_SRC = arena_SX[:, 32 : 32 + num_rows * channels].unflatten(1, (num_rows, channels))
    for slot in filled:
        window_SRC[slot].normal_()
    return window_SRC


def near(actual: Tensor, expected: Tensor, device: str) -> None:
    ratio = FLOAT32_RATIO if expected.dtype == torch.float32 else BFLOAT16_RATIO[device]
    assert actual.dtype == expected.dtype
    exact = expected.double().cpu()
    assert float((actual.double().cpu() - exact).norm() / exact.norm()) < ratio


def on_host(convolution: Convolution) -> Convolution:
    weight_CW, bias_C, activation = convolution
    return Convolution(weight_CW.cpu(), None if bias_C is None else bias_C.cpu(), activation)


def check_prefill(
    prompts: Sequence[Prompt],
    channels: int,
    dtype: torch.dtype,
    device: str,
    width: int = 4,
    has_bias: bool = False,
    activation: Activation = "silu",
) -> None:
    """Assert outputs and windows, and that nothing else in memory has changed a bit."""
    x_TC = make_tokens(sum(p.end - p.start for p in prompts), channels, dtype, device)
    weight_CW = torch.randn(channels, width, device=device).to(dtype)
    bias_C = torch.randn(channels, device=device).to(dtype) if has_bias else None
    named = [slot for p in prompts for slot in (p.src, p.dst, *(cut for _, cut in p.cuts))]
    window_SRC = make_arena(max(named) + 2, sorted({p.src for p in prompts} - {0}), channels, dtype, device)
    expected_SRC = window_SRC.cpu().clone()
    ranges, cuts = [(p.start, p.end) for p in prompts], [p.cuts for p in prompts]
    slots = Slots(*(torch.tensor([getattr(p, name) for p in prompts]) for name in ("src", "dst")))
    convolution = Convolution(weight_CW, bias_C, activation)
    expected_TC = conv1d.causal_conv1d_prefill.reference(
        x_TC.cpu(), on_host(convolution), expected_SRC, slots, build_chunk_table(ranges, cuts)
    )
    slots, chunks = Slots(*(x.to(device) for x in slots)), build_chunk_table(ranges, cuts, device)
    with poisoned_memory():
        y_TC = causal_conv1d_prefill(x_TC, convolution, window_SRC, slots, chunks)
    near(y_TC, expected_TC, device)
    assert torch.equal(window_SRC.cpu().nan_to_num(99.0), expected_SRC.nan_to_num(99.0))


def check_update(
    src: Sequence[int],
    dst: Sequence[int],
    channels: int,
    dtype: torch.dtype,
    device: str,
    width: int = 4,
    has_bias: bool = False,
    activation: Activation = "silu",
) -> None:
    """Assert outputs and windows, and that nothing else in memory has changed a bit."""
    x_NC = make_tokens(len(src), channels, dtype, device)
    weight_CW = torch.randn(channels, width, device=device).to(dtype)
    bias_C = torch.randn(channels, device=device).to(dtype) if has_bias else None
    window_SRC = make_arena(max(*src, *dst) + 2, sorted({*src} - {0}), channels, dtype, device)
    expected_SRC = window_SRC.cpu().clone()
    slots, convolution = Slots(torch.tensor(src), torch.tensor(dst)), Convolution(weight_CW, bias_C, activation)
    expected_NC = conv1d.causal_conv1d_update.reference(x_NC.cpu(), on_host(convolution), expected_SRC, slots)
    with poisoned_memory():
        y_NC = causal_conv1d_update(x_NC, convolution, window_SRC, Slots(*(x.to(device) for x in slots)))
    near(y_NC, expected_NC, device)
    assert torch.equal(window_SRC.cpu().nan_to_num(99.0), expected_SRC.nan_to_num(99.0))


def check_updates_equal_a_prefill(channels: int, dtype: torch.dtype, device: str) -> None:
    """Token by token or all at once, from one window: the same bits of outputs and windows."""
    x_TC = make_tokens(21, channels, dtype, device)
    convolution = Convolution(torch.randn(channels, 4, device=device).to(dtype))
    window_SRC = make_arena(5, [1], channels, dtype, device)
    slots = Slots(*(torch.tensor([value], device=device) for value in (1, 2)))
    chunks = build_chunk_table([(5, 26)], [()], device)
    y_TC = causal_conv1d_prefill(x_TC, convolution, window_SRC, slots, chunks)
    for i in range(21):
        slots = Slots(torch.tensor([3 if i else 1], device=device), torch.tensor([3], device=device))
        y_NC = causal_conv1d_update(x_TC[i : i + 1], convolution, window_SRC, slots)
        assert torch.equal(y_NC[0], y_TC[i])
    assert torch.equal(window_SRC[3, :3], window_SRC[2, :3])


def check_nan_stays_in_its_sequence(device: str) -> None:
    x_TC = make_tokens(12, 64, torch.float32, device)
    x_TC[4:8] = torch.nan
    window_SRC = make_arena(5, [], 64, torch.float32, device)
    slots = Slots(torch.zeros(3, dtype=torch.int64, device=device), torch.arange(1, 4, device=device))
    chunks = build_chunk_table([(0, 4)] * 3, [()] * 3, device)
    y_TC = causal_conv1d_prefill(x_TC, Convolution(torch.randn(64, 4, device=device)), window_SRC, slots, chunks)
    assert y_TC[:4].isfinite().all()
    assert y_TC[4:8].isnan().all()
    assert y_TC[8:].isfinite().all()
    assert window_SRC[[1, 3], :3].isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 15, 16, 17, 63, 65, 130])
@pytest.mark.parametrize("start", [0, 37])
def test_prefill_equals_the_torch_version_at_any_length(num_tokens: int, start: int) -> None:
    wanted = sorted({1, 2, 3, num_tokens // 2, num_tokens})
    cuts = tuple((start + p, 3 + i) for i, p in enumerate(wanted) if 0 < p <= num_tokens)
    prompt = Prompt(start, start + num_tokens, src=2 if start else 0, dst=1, cuts=cuts)
    check_prefill([prompt], 64, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_of_a_mixed_batch_treats_each_sequence_alone(dtype: torch.dtype) -> None:
    check_prefill(MIXED, 72, dtype, "cpu")


def test_cuts_find_their_sequence_among_many() -> None:
    prompts = [Prompt(i, i + 1 + i % 5, 0, 1 + i, cuts=((i + 1 + i % 3 % (1 + i % 5), 200 + i),)) for i in range(70)]
    check_prefill(prompts, 8, torch.float32, "cpu")


WITH_IN_PLACE = [
    *MIXED,
    *(Prompt(30 * i, 30 * i + 1 + i, src=30 + i, dst=0, cuts=((30 * i + 1 + i // 2, 30 + i),)) for i in range(12)),
]
"""Also cuts to the slots that the sequences come from: before and behind the grid, short of a window or not."""


@pytest.mark.parametrize("width", [2, 4, 5, 7, 10])
def test_a_cut_may_go_to_its_own_sequences_slot(width: int) -> None:
    check_prefill(WITH_IN_PLACE, 72, torch.float32, "cpu", width)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 7, 10])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_width_bias_and_activation(width: int, activation: Activation, has_bias: bool) -> None:
    prompts = [Prompt(0, 5, 1, 1), Prompt(3, 7, 0, 2, cuts=((4, 3), (5, 4)))]
    check_prefill(prompts, 37, torch.float32, "cpu", width, has_bias, activation)
    check_update([1, 2, 0], [1, 3, 4], 37, torch.float32, "cpu", width, has_bias, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_sequences", [1, 17, 65])
def test_update_in_place_from_a_shared_window_and_from_nothing(num_sequences: int, dtype: torch.dtype) -> None:
    slots = list(range(1, num_sequences + 1))
    check_update(slots, slots, 72, dtype, "cpu")
    check_update([num_sequences + 1] * num_sequences, slots, 72, dtype, "cpu")
    check_update([0] * num_sequences, slots, 72, dtype, "cpu")


def test_padded_rows_and_null_destinations_write_nothing() -> None:
    check_update([1, 2, 0, 0], [1, 0, 0, 0], 72, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_token_by_token_change_no_bit_of_a_prefill(dtype: torch.dtype) -> None:
    check_updates_equal_a_prefill(40, dtype, "cpu")


def test_nan_in_one_sequence_stays_there() -> None:
    check_nan_stays_in_its_sequence("cpu")


def test_step_of_empty_sequences_alone_touches_nothing() -> None:
    num_rows, channels, count = 5, 32, 3
    any_chunk = (1,) * (2 * count + 1)
    # What lies before the tables is as large as it can be.
    columns = [torch.full((1 + len(any_chunk),), 2**40) for _ in range(4)]
    for column, value in zip(columns, (0, num_rows, 0, 0), strict=True):
        column[1:] = value
    first_chunks, *others = (column[1:] for column in columns)
    chunks = Chunks((0,) * (count + 1), any_chunk, any_chunk, any_chunk, is_short=True)
    table = chunks.with_tensors([first_chunks[: count + 1], *others])
    window_SRC = make_arena(4, [1], channels, torch.float32, "cpu")
    before_SRC = window_SRC.clone()
    x_TC, null_N = make_tokens(num_rows, channels, torch.float32, "cpu"), torch.zeros(count, dtype=torch.int64)
    causal_conv1d_prefill(x_TC, Convolution(torch.randn(channels, 4)), window_SRC, Slots(null_N, null_N), table)
    assert torch.equal(window_SRC.nan_to_num(), before_SRC.nan_to_num())
