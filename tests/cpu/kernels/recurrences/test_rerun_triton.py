"""Triton's ``insert_logged`` against torch's: all rows, the log, and nothing else."""

import os

import pytest
import torch
from torch import Tensor

from strandline.kernels.batch import RerunBatch
from strandline.kernels.recurrences.rerun import insert_logged as declared
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.recurrences.rerun_triton import insert_logged

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def make_batch(lengths: list[tuple[int, int, int]], draft_tokens: int, device: str) -> RerunBatch:
    """Return the tables of sequences with a log each.

    Args:
        lengths: per sequence, tokens logged, tokens of the step, and how many of those are drafts.
    """
    step_rows, logged_rows, logged_entries, draft_rows, draft_entries = ([] for _ in range(5))
    row = step_row = 0
    for log, (num_logged, num_rows, num_drafts) in enumerate(lengths, start=1):
        logged_rows += range(row, row + num_logged)
        logged_entries += range(log * draft_tokens, log * draft_tokens + num_logged)
        step_rows += range(row + num_logged, row + num_logged + num_rows)
        row, step_row = row + num_logged + num_rows, step_row + num_rows
        draft_rows += range(step_row - num_drafts, step_row)
        draft_entries += range(log * draft_tokens, log * draft_tokens + num_drafts)
    columns = (step_rows, logged_rows, logged_entries, draft_rows, draft_entries)
    return RerunBatch(
        row, *(torch.tensor(x, dtype=torch.int64, device=device) for x in columns), insert_logged=insert_logged
    )


def check_insert(sizes: list[int], lengths: list[tuple[int, int, int]], dtype: torch.dtype, device: str) -> None:
    draft_tokens = 3
    rerun = make_batch(lengths, draft_tokens, device)
    num_rows = len(rerun.step_rows_T)
    fused_TX = torch.randn(num_rows, sum(sizes), device=device).to(dtype)
    inputs = fused_TX.split(sizes, dim=1)
    log = tuple(torch.randn((1 + len(lengths)) * draft_tokens, size, device=device).to(dtype) for size in sizes)
    expected_log = tuple(x.clone() for x in log)
    expected: tuple[Tensor, ...] = declared.reference(rerun, expected_log, inputs)
    with poisoned_memory():
        outs = insert_logged(rerun, log, inputs)
    for out, wanted in zip((*outs, *log), (*expected, *expected_log), strict=True):
        assert torch.equal(out, wanted)


LENGTHS = [
    [(0, 1, 0)],
    [(2, 1, 0), (3, 4, 3), (0, 3, 2), (1, 2, 1)],
    [(0, 4, 3), (0, 2, 1)],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sizes", [[1500], [1100, 4, 4], [8, 70, 3, 1030]])
def test_rows_and_log_are_torchs(sizes: list[int], lengths: list[tuple[int, int, int]]) -> None:
    check_insert(sizes, lengths, torch.bfloat16, "cpu")
