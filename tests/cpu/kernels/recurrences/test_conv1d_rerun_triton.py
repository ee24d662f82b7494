"""Triton's convolution of logged inputs and a step's own against torch's: outputs, logs, windows, and nothing else.

The ``check_`` function runs on any device; tests/gpu runs it at the published models' shapes. Shape suffixes as in
``kernels/recurrences/conv1d.py``.
"""

import os
from dataclasses import replace

import pytest
import torch

from strandline.kernels.batch import RerunBatch, Slots
from strandline.kernels.chunk_table import Chunks, ChunkTable
from strandline.kernels.recurrences import conv1d
from strandline.kernels.recurrences.conv1d import Activation, Convolution
from strandline.kernels.recurrences.rerun import insert_logged
from tests.cpu.kernels.recurrences.test_conv1d_triton import make_arena, make_tokens, near
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.recurrences.conv1d_rerun_triton import causal_conv1d_rerun

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")

Lengths = list[tuple[int, int, int]]
"""For each sequence, its logged tokens, its rows of the step, and how many of these are drafts."""

LENGTHS: list[Lengths] = [
    [(0, 1, 0)],
    [(2, 1, 0), (3, 4, 3), (0, 3, 2), (1, 2, 1), (1, 1, 0), (0, 2, 1)],
    [(16, 17, 16), (9, 3, 2), (0, 17, 16), (4, 5, 4), (5, 4, 3)],
]


def make_step(
    lengths: Lengths, most_drafts: int, device: str, num_fillers: int = 1
) -> tuple[RerunBatch, ChunkTable, dict[str, torch.Tensor]]:
    """Return a step's tables, padded by a sequence without chunks and rows of no token.

    Every second sequence writes its state to the slot that it reads. Where there are drafts, a cut before them does.
    """
    names = ("step_rows", "logged_rows", "logged_entries", "draft_rows", "draft_entries", "src", "dst")
    table = {name: list[int]() for name in names}
    first_chunks, chunks = [0], list[tuple[int, int, int]]()
    row = step_row = 0
    for index, (num_logged, num_rows, num_drafts) in enumerate(lengths, start=1):
        src, first = 2 * index, index * most_drafts
        dst = src if index % 2 else src + 1
        table["logged_rows"] += range(row, row + num_logged)
        table["logged_entries"] += range(first, first + num_logged)
        table["step_rows"] += range(row + num_logged, row + num_logged + num_rows)
        certain = num_logged + num_rows - num_drafts
        chunks += [(row, certain, dst * (num_drafts > 0))] + [(row + certain, num_drafts, 0)] * (num_drafts > 0)
        row, step_row = row + num_logged + num_rows, step_row + num_rows
        table["draft_rows"] += range(step_row - num_drafts, step_row)
        table["draft_entries"] += range(first, first + num_drafts)
        table["src"].append(src * (index != 3))
        table["dst"].append(dst * (num_drafts == 0))
        first_chunks.append(len(chunks))
    table["step_rows"] += [row] * num_fillers
    for name, value in {
        "logged_rows": row,
        "logged_entries": 0,
        "draft_rows": 0,
        "draft_entries": 0,
    }.items():
        table[name].append(value)
    chunks.append((row, 0, 0))
    tensors = {name: torch.tensor(column, dtype=torch.int64, device=device) for name, column in table.items()}
    columns = (tensors[name] for name in names[:5])
    rerun = RerunBatch(row + 1, *columns, insert_logged=insert_logged.reference, is_padded=True)
    starts, sizes, cuts = zip(*chunks, strict=True)
    host = Chunks((*first_chunks, first_chunks[-1]), starts, sizes, cuts, is_short=True)
    on_device = host.with_tensors([torch.tensor(column, device=device) for column in host.columns])
    ends = {name: torch.nn.functional.pad(tensors[name], (0, 1)) for name in ("src", "dst")}
    return rerun, on_device, ends


def with_row_tables(rerun: RerunBatch) -> RerunBatch:
    """Return a step with its tables row by row; the row of no token, which is in no chunk, has any values there."""
    source_R, entry_R = torch.full((2, rerun.num_rows), 10**9, device=rerun.step_rows_T.device)
    for row, step_row in enumerate(rerun.step_rows_T[:-1].tolist()):
        source_R[step_row], entry_R[step_row] = row, -1
    for row, entry in zip(rerun.logged_rows_Q[:-1].tolist(), rerun.logged_entries_Q[:-1].tolist(), strict=True):
        source_R[row], entry_R[row] = -1 - entry, -1
    for row, entry in zip(rerun.draft_rows_K[:-1].tolist(), rerun.draft_entries_K[:-1].tolist(), strict=True):
        entry_R[rerun.step_rows_T[row]] = entry
    return replace(rerun, source_R=source_R, entry_R=entry_R)


def check_rerun(
    lengths: Lengths,
    sizes: list[int],
    num_taps: int,
    dtype: torch.dtype,
    device: str,
    activation: Activation = "silu",
    *,
    has_bias: bool = False,
    has_row_tables: bool = False,
) -> None:
    most_drafts = max(max(num_logged, num_drafts) for num_logged, _, num_drafts in lengths) or 1
    rerun, chunks, ends = make_step(lengths, most_drafts, device)
    if has_row_tables:
        rerun = with_row_tables(rerun)
    wide = make_tokens(len(rerun.step_rows_T), sum(sizes), dtype, device)
    inputs = wide.split(sizes, dim=1)
    num_entries = (1 + len(lengths)) * most_drafts
    log = tuple(torch.randn(num_entries, size, device=device).to(dtype) for size in sizes)
    weight_CW = torch.randn(sizes[0], num_taps, device=device).to(dtype)
    bias_C = torch.randn(sizes[0], device=device).to(dtype) if has_bias else None
    num_slots = 2 * len(lengths) + 2
    window_SRC = make_arena(num_slots, range(2, num_slots), sizes[0], dtype, device)
    copies = tuple(x.clone() for x in log), window_SRC.clone()
    convolution, table = Convolution(weight_CW, bias_C, activation), (Slots(ends["src"], ends["dst"]), chunks)
    expected = conv1d.causal_conv1d_rerun.reference(inputs, copies[0], rerun, convolution, copies[1], *table)
    with poisoned_memory():
        found = causal_conv1d_rerun(inputs, log, rerun, convolution, window_SRC, *table)
    num_rows = rerun.num_rows - 1
    near(found[0][:num_rows], expected[0][:num_rows], device)
    for out, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(out[:num_rows], wanted[:num_rows])
    for out, wanted in zip(log, copies[0], strict=True):
        assert torch.equal(out[most_drafts:], wanted[most_drafts:])
    torch.testing.assert_close(window_SRC, copies[1], rtol=0, atol=0, equal_nan=True)


def test_many_sequences_equal_torch() -> None:
    check_rerun([(2, 3, 2)] * 33, [70, 4], 4, torch.float32, "cpu")


@pytest.mark.parametrize("num_taps", [2, 4, 7, 10])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_convolution_logs_and_windows_are_torchs(lengths: Lengths, num_taps: int) -> None:
    check_rerun(lengths, [300, 5, 8], num_taps, torch.float32, "cpu")


@pytest.mark.parametrize(("sizes", "activation", "has_bias"), [([70], None, True), ([256, 3], "silu", True)])
def test_inputs_alone_and_with_another_are_torchs(sizes: list[int], activation: Activation, has_bias: bool) -> None:
    check_rerun(LENGTHS[1], sizes, 4, torch.bfloat16, "cpu", activation, has_bias=has_bias)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_tables_row_by_row_give_the_same(lengths: Lengths) -> None:
    check_rerun(lengths, [300, 5, 8], 4, torch.float32, "cpu", has_row_tables=True)


def test_wide_or_many_inputs_are_convolved_as_a_prompts() -> None:
    check_rerun(LENGTHS[1], [40, 300], 4, torch.float32, "cpu")
    check_rerun(LENGTHS[1], [40, 3, 3, 3], 4, torch.float32, "cpu")
