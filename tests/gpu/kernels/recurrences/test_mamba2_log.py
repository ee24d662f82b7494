"""The Triton decode step of Mamba-2 with a log on a GPU, at odd shapes and those of Nemotron-3-Nano and Falcon-H1."""

from dataclasses import replace

import pytest
import torch

from strandline.kernels.recurrences import mamba2_log_triton as kernel
from strandline.kernels.recurrences.decode_launches import HEADS_WITH_LOG, DecodeLaunch
from strandline.kernels.recurrences.gdn_log import LOG_TOKENS, LogMemory, gdn_fold
from strandline.kernels.recurrences.mamba2_log import mamba2_log
from tests.cpu.kernels.recurrences import test_mamba2_log as checks
from tests.cpu.kernels.recurrences.test_mamba2_log import SHAPES, TOLERANCES, USUAL, Setting, Shape

GPU = replace(checks.version("triton"), device="cuda")
NEMOTRON = replace(GPU, shape=Shape(8, 64, 128, 64), dtype=torch.bfloat16)
FALCON = replace(GPU, shape=Shape(1, 24, 256, 128), dtype=torch.bfloat16)
"""Keys so long that a program has more warps."""


@pytest.mark.parametrize("shape", [USUAL, *SHAPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logs_hold_for_any_ratio_and_size_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    checks.check_any_schedule(replace(GPU, shape=shape, dtype=dtype), seed=1)


@pytest.mark.parametrize("setting", [NEMOTRON, FALCON], ids=["nemotron", "falcon-h1"])
@pytest.mark.parametrize("launch", [HEADS_WITH_LOG.few, HEADS_WITH_LOG.many], ids=str)
def test_logs_change_neither_outputs_nor_states_of_a_published_model(
    launch: DecodeLaunch, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "choose_decode", lambda measured, num_sequences: launch)
    checks.check_any_schedule(setting, seed=2)


def test_states_that_move_or_end_leave_other_slots_alone() -> None:
    checks.check_states_that_move_or_end(NEMOTRON)


def test_state_without_log_is_written_every_step() -> None:
    checks.check_a_sequence_without_a_log(NEMOTRON)


def test_logs_of_many_sequences_of_many_heads_are_folded() -> None:
    """In one launch of more than 65,535 programs."""
    count, shape = 1030, Shape(8, 64, 16, 32)
    tensors = mamba2_log(*shape).spec.tensors
    memory = LogMemory(*(torch.rand(1, 1 + count, *x.shape, device="cuda") for x in tensors))
    memory.decay_JHL.neg_()
    found_RSHKV = torch.randn(1, 1 + count, shape.num_heads, shape.state_dim, shape.head_dim, device="cuda")
    expected_RSHKV = found_RSHKV.clone()
    log_N = 1 + torch.randperm(count, device="cuda")
    len_N = 1 + torch.arange(count, device="cuda") % LOG_TOKENS
    GPU.fold(found_RSHKV, memory, log_N, log_N, len_N)
    gdn_fold.reference(expected_RSHKV, memory, log_N, log_N, len_N)
    torch.testing.assert_close(found_RSHKV, expected_RSHKV, **TOLERANCES[torch.float32])
