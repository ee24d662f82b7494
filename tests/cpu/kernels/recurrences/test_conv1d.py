"""The short convolution against one pass over the whole sequence: outputs, final windows, windows at cuts.

Shape suffixes as in ``kernels/recurrences/conv1d.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strandline.kernels.batch import Slots
from strandline.kernels.chunk_table import build_chunk_table
from strandline.kernels.recurrences import conv1d
from strandline.kernels.recurrences.conv1d import Activation, Convolution
from tests.bound import bound

causal_conv1d_prefill = bound(conv1d.causal_conv1d_prefill)
causal_conv1d_update = bound(conv1d.causal_conv1d_update)

pytestmark = pytest.mark.usefixtures("each_version")

FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}
"""W products of values near 1, added in another order."""

BFLOAT16_RELATIVE_NORM = 8e-3
"""Two roundings to bfloat16, by at most 2 ** -8 of each element: before and after the activation."""

NUM_SLOTS = 16
NUM_ROWS = 10
CHANNELS = 64
"""Fills whole vectors: where it does not, torch rounds the activation of the last channels differently."""
WIDTH = 4
POISON = float("nan")


@dataclass(frozen=True)
class Prompt:
    """One sequence of a step: its token range, where its window comes from and goes to, and its cuts."""

    start: int
    end: int
    src: int
    dst: int
    cuts: tuple[tuple[int, int], ...] = ()


def make_arena(
    filled_slots: Sequence[int] = (), dtype: torch.dtype = torch.float32, channels: int = CHANNELS
) -> Tensor:
    """Return the strided view of one layer's windows: NaN everywhere but in the filled slots."""
    arena_SX = torch.full((NUM_SLOTS, NUM_ROWS * channels + 96), POISON, dtype=dtype)
    window_SRC = arena_SX[:, 32 : 32 + NUM_ROWS * channels].unflatten(1, (NUM_ROWS, channels))
    for slot in filled_slots:
        window_SRC[slot] = torch.randn(NUM_ROWS, channels).to(dtype)
    return window_SRC


def make_filter(width: int = WIDTH, channels: int = CHANNELS) -> Tensor:
    return torch.randn(channels, width)


def reference(inputs_XC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: Activation) -> Tensor:
    """Filter tap by tap in float32; the first W - 1 inputs are the window."""
    width = weight_CW.shape[1]
    y_TC = sum(
        inputs_XC[tap : len(inputs_XC) - width + 1 + tap].float() * weight_CW[:, tap].float() for tap in range(width)
    )
    assert isinstance(y_TC, Tensor)
    y_TC = y_TC if bias_C is None else y_TC + bias_C.float()
    return F.silu(y_TC) if activation == "silu" else y_TC


def initial_window(window_SRC: Tensor, slot: int, num_rows: int) -> Tensor:
    if slot == 0:
        return torch.zeros(num_rows, window_SRC.shape[2], dtype=window_SRC.dtype)
    return window_SRC[slot, :num_rows].clone()


def prefill(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_SRC: Tensor,
    prompts: Sequence[Prompt],
    bias_C: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    chunks = build_chunk_table([(p.start, p.end) for p in prompts], [p.cuts for p in prompts])
    slots = Slots(*(torch.tensor([getattr(p, name) for p in prompts]) for name in ("src", "dst")))
    return causal_conv1d_prefill(x_TC, Convolution(weight_CW, bias_C, activation), window_SRC, slots, chunks)


def check_prefill(
    x_TC: Tensor,
    weight_CW: Tensor,
    window_SRC: Tensor,
    prompts: Sequence[Prompt],
    bias_C: Tensor | None = None,
    activation: Activation = "silu",
) -> None:
    """Assert outputs, final windows, windows at cuts, and that nothing else in memory has changed."""
    num_rows = weight_CW.shape[1] - 1
    expected_SRC = window_SRC.clone()
    expected_ys, row = [], 0
    for prompt in prompts:
        x = x_TC[row : row + prompt.end - prompt.start]
        inputs_XC = torch.cat((initial_window(window_SRC, prompt.src, num_rows), x))
        expected_ys.append(reference(inputs_XC, weight_CW, bias_C, activation))
        for position, slot in (*prompt.cuts, (prompt.end, prompt.dst)):
            if slot:
                last = position - prompt.start
                expected_SRC[slot, :num_rows] = inputs_XC[last : last + num_rows]
        row += len(x)
    y_TC = prefill(x_TC, weight_CW, window_SRC, prompts, bias_C, activation)
    torch.testing.assert_close(y_TC, torch.cat(expected_ys), **FLOAT32)
    assert torch.equal(window_SRC.nan_to_num(99.0), expected_SRC.nan_to_num(99.0))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("start", [0, 37])
def test_prefill_equals_one_pass_at_any_length(num_tokens: int, start: int) -> None:
    wanted = sorted({1, 2, 3, num_tokens // 2, num_tokens})
    cuts = tuple((start + p, 3 + i) for i, p in enumerate(wanted) if 0 < p <= num_tokens)
    prompt = Prompt(start, start + num_tokens, src=2 if start else 0, dst=1, cuts=cuts)
    check_prefill(torch.randn(num_tokens, CHANNELS), make_filter(), make_arena([2]), [prompt])


@pytest.mark.parametrize("width", [2, 3, 4, 5, 7, 10])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("channels", [CHANNELS, 37])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_width_bias_activation_and_channels(
    width: int, activation: Activation, channels: int, has_bias: bool
) -> None:
    bias_C = torch.randn(channels) if has_bias else None
    x_TC, weight_CW = torch.randn(9, channels), make_filter(width, channels)
    prompts = [Prompt(0, 5, 1, 1), Prompt(3, 7, 0, 2, cuts=((4, 3),))]
    check_prefill(x_TC, weight_CW, make_arena([1], channels=channels), prompts, bias_C, activation)
    check_update(x_TC[:3], weight_CW, make_arena([1, 2], channels=channels), [1, 2, 0], [1, 3, 4], bias_C, activation)


def test_prefill_of_a_mixed_batch_treats_each_sequence_alone() -> None:
    prompts = [
        Prompt(37, 38, src=1, dst=1),
        Prompt(0, 130, src=0, dst=2, cuts=((1, 3), (64, 4), (65, 5), (130, 6))),
        Prompt(64, 66, src=7, dst=8, cuts=((65, 9),)),
        Prompt(63, 200, src=7, dst=10),
        Prompt(5, 8, src=7, dst=11, cuts=((6, 12), (8, 13))),
        Prompt(0, 1, src=0, dst=14),
        Prompt(0, 2, src=7, dst=0, cuts=((1, 15),)),
    ]
    x_TC = torch.randn(sum(p.end - p.start for p in prompts), CHANNELS)
    check_prefill(x_TC, make_filter(), make_arena([1, 7]), prompts)


def test_windows_are_read_before_any_is_written() -> None:
    prompts = [Prompt(0, 4, 1, 2, cuts=((1, 3),)), Prompt(0, 2, 2, 1), Prompt(0, 1, 3, 4)]
    check_prefill(torch.randn(7, CHANNELS), make_filter(), make_arena([1, 2, 3]), prompts)
    check_update(torch.randn(3, CHANNELS), make_filter(), make_arena([1, 2, 3]), [1, 2, 3], [2, 3, 1])


def test_nan_in_the_tokens_of_one_sequence_stays_there() -> None:
    x_TC = torch.randn(12, CHANNELS)
    x_TC[4:8] = POISON
    window_SRC = make_arena()
    y_TC = prefill(x_TC, make_filter(), window_SRC, [Prompt(0, 4, 0, 1), Prompt(0, 4, 0, 2), Prompt(0, 4, 0, 3)])
    assert y_TC[:4].isfinite().all()
    assert y_TC[8:].isfinite().all()
    assert window_SRC[[1, 3], : WIDTH - 1].isfinite().all()


@given(data=st.data())
@settings(max_examples=2 * settings().max_examples // 5)
def test_partition_into_steps_and_cuts_changes_no_bit(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 150), "num_tokens")
    bounds = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=4), "steps") | {num_tokens})
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=6), "cuts"))
    torch.manual_seed(num_tokens)
    x_TC, weight_CW = torch.randn(num_tokens, CHANNELS), make_filter()
    window_SRC = make_arena()
    slot_of_cut = {position: 6 + i for i, position in enumerate(cuts)}
    ys = []
    for i, (start, end) in enumerate(pairwise([0, *bounds])):
        step_cuts = tuple((p, slot) for p, slot in slot_of_cut.items() if start < p <= end)
        ys.append(prefill(x_TC[start:end], weight_CW, window_SRC, [Prompt(start, end, i, i + 1, cuts=step_cuts)]))
    whole_TC = prefill(x_TC, weight_CW, make_arena(), [Prompt(0, num_tokens, 0, 1)])
    assert torch.equal(torch.cat(ys), whole_TC)
    padded_XC = F.pad(x_TC, (0, 0, WIDTH - 1, 0))
    slot_of_end = {end: i + 1 for i, end in enumerate(bounds)}
    for position, slot in (*slot_of_cut.items(), *slot_of_end.items()):
        assert torch.equal(window_SRC[slot, : WIDTH - 1], padded_XC[position : position + WIDTH - 1])


def test_prefill_equals_the_convolution_of_transformers() -> None:
    x_TC, weight_CW = torch.randn(70, CHANNELS), make_filter()
    conv = torch.nn.Conv1d(CHANNELS, CHANNELS, WIDTH, groups=CHANNELS, padding=WIDTH - 1, bias=False)
    conv.weight.data = weight_CW.unsqueeze(1)
    expected_TC = F.silu(conv(x_TC.T.unsqueeze(0)))[0, :, :70].T
    torch.testing.assert_close(
        prefill(x_TC, weight_CW, make_arena(), [Prompt(0, 70, 0, 1)]), expected_TC.detach(), **FLOAT32
    )


@pytest.mark.parametrize("window_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_costs_two_roundings(window_dtype: torch.dtype) -> None:
    x_TC, weight_CW = torch.randn(100, CHANNELS).bfloat16(), make_filter().bfloat16()
    window_SRC = make_arena([1], window_dtype)
    window_SRC[1] = window_SRC[1].bfloat16()
    window = window_SRC[1, : WIDTH - 1].bfloat16()
    exact_TC = reference(torch.cat((window, x_TC)), weight_CW, None, "silu")
    y_TC = prefill(x_TC, weight_CW, window_SRC, [Prompt(0, 100, 1, 2)])
    assert y_TC.dtype == torch.bfloat16
    assert (y_TC.float() - exact_TC).norm() < BFLOAT16_RELATIVE_NORM * exact_TC.norm()
    assert torch.equal(window_SRC[2, : WIDTH - 1].bfloat16(), x_TC[-WIDTH + 1 :])


def test_prefill_reads_strided_inputs_and_leaves_them() -> None:
    x_TC = torch.randn(70, 3 * CHANNELS)[:, CHANNELS : 2 * CHANNELS]
    before_TC = x_TC.clone()
    check_prefill(x_TC, make_filter(), make_arena([1]), [Prompt(0, 70, 1, 2)])
    assert torch.equal(x_TC, before_TC)


def check_update(
    x_NC: Tensor,
    weight_CW: Tensor,
    window_SRC: Tensor,
    src: Sequence[int],
    dst: Sequence[int],
    bias_C: Tensor | None = None,
    activation: Activation = "silu",
) -> None:
    num_rows = weight_CW.shape[1] - 1
    expected_SRC = window_SRC.clone()
    expected_ys = []
    for x_C, src_slot, dst_slot in zip(x_NC, src, dst, strict=True):
        inputs_WC = torch.cat((initial_window(window_SRC, src_slot, num_rows), x_C.unsqueeze(0)))
        expected_ys.append(reference(inputs_WC, weight_CW, bias_C, activation))
        if dst_slot:
            expected_SRC[dst_slot, :num_rows] = inputs_WC[1:]
    slots = Slots(torch.tensor(src), torch.tensor(dst))
    y_NC = causal_conv1d_update(x_NC, Convolution(weight_CW, bias_C, activation), window_SRC, slots)
    torch.testing.assert_close(y_NC, torch.cat(expected_ys), **FLOAT32)
    assert torch.equal(window_SRC.nan_to_num(99.0), expected_SRC.nan_to_num(99.0))


def test_update_in_place_from_a_shared_window_and_from_nothing() -> None:
    check_update(
        torch.randn(6, CHANNELS),
        make_filter(),
        make_arena([1, 2]),
        [1, 2, 2, 0, 2, 0],
        [1, 3, 4, 5, 0, 0],
    )


def test_updates_token_by_token_change_no_bit_of_a_prefill() -> None:
    x_TC, weight_CW, window_SRC = torch.randn(9, CHANNELS), make_filter(), make_arena([1])
    y_TC = prefill(x_TC, weight_CW, window_SRC, [Prompt(0, 9, 1, 2)])
    for i in range(9):
        slots = Slots(torch.tensor([3 if i else 1]), torch.tensor([3]))
        y_NC = causal_conv1d_update(x_TC[i : i + 1], Convolution(weight_CW), window_SRC, slots)
        assert torch.equal(y_NC[0], y_TC[i])
    assert torch.equal(window_SRC[3, : WIDTH - 1], window_SRC[2, : WIDTH - 1])


def test_batch_and_number_of_threads_change_no_bit() -> None:
    prompts = [Prompt(5, 30, 1, 4), Prompt(37, 136, 2, 5, cuts=((70, 8),)), Prompt(0, 77, 3, 6)]
    x_TC, weight_CW, before_SRC = torch.randn(201, 600), make_filter(channels=600), make_arena([1, 2, 3], channels=600)
    threads, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            window_SRC = before_SRC.clone()
            results.append((prefill(x_TC.bfloat16(), weight_CW.bfloat16(), window_SRC, prompts), window_SRC))
    finally:
        torch.set_num_threads(threads)
    for y_TC, window_SRC in results[1:]:
        assert torch.equal(y_TC, results[0][0])
        assert torch.equal(window_SRC.nan_to_num(99.0), results[0][1].nan_to_num(99.0))
    row = 0
    for prompt in prompts:
        end, window_SRC = row + prompt.end - prompt.start, before_SRC.clone()
        alone_TC = prefill(x_TC[row:end].bfloat16(), weight_CW.bfloat16(), window_SRC, [prompt])
        assert torch.equal(alone_TC, results[0][0][row:end])
        row = end
