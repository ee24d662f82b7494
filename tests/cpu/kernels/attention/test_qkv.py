"""Queries, keys and values: normalised and rotated as the separate operations do it; stored where they belong."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from strandline.kernels.arena import NAN_BYTE, ArenaTensors
from strandline.kernels.attention import qkv
from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.rowwise.norm import rms_norm, rms_norm_zero_centered
from strandline.kernels.rowwise.rotary import apply_rotary, default_frequencies, rotary_table
from strandline.specs import ModelSpec, kv_spec
from tests.bound import bound

prepare_qkv = bound(qkv.prepare_qkv)

pytestmark = pytest.mark.usefixtures("each_version")

EPS = 1e-6
NUM_BLOCKS = 5


@dataclass
class Case:
    """One layer's projected rows, with features behind the values that must not be read."""

    projected_TO: Tensor
    num_heads: int
    norm: HeadNorm
    rotary: tuple[Tensor, Tensor]
    memory: KVMemory
    batch: AttentionBatch


def make_case(
    blocks: list[int],
    offsets: list[int],
    *,
    heads: tuple[int, int, int] = (6, 2, 16),
    rotary_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    scales: tuple[float, float] | None = None,
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    kept_dtype = dtype if scales is None else torch.float8_e4m3fn
    layer = kv_spec(num_kv_heads, head_dim, str(kept_dtype).removeprefix("torch."))
    arena = ArenaTensors(ModelSpec((layer, layer), 4, "float32"), NUM_BLOCKS)
    arena.bytes.fill_(NAN_BYTE)
    streams = arena.layers[1].streams
    memory = KVMemory(streams["key"], streams["value"], *scales or (1.0, 1.0))
    num_tokens = len(blocks)
    projected_TO = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + 5).to(dtype)
    positions_T = torch.randint(0, 5000, (num_tokens,))
    empty = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        query_starts=(),
        context_lens=(),
        query_starts_N1=empty,
        context_lens_N=empty,
        block_table_NM=empty,
        write_blocks_T=torch.tensor(blocks),
        write_offsets_T=torch.tensor(offsets),
        is_all_written=0 not in blocks,
    )
    rotary = rotary_table.reference(positions_T, default_frequencies(1e4, rotary_dim), 1.0)
    norm = HeadNorm(*torch.randn(2, head_dim).to(dtype), EPS, is_zero_centered=True)
    return Case(projected_TO, num_heads, norm, rotary, memory, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[1, 3, 3, 4], [2, 0, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("norm", ["none", "rms", "zero-centred"])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_only_keys_and_values_of_named_rows_are_stored(
    blocks: list[int], dtype: torch.dtype, norm: str, is_rotated: bool
) -> None:
    case = make_case(blocks, [63, 0, 7, 1], dtype=dtype)
    num_kv_heads, head_dim = case.memory.k_BPGD.shape[2:]
    split = [case.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, 5]
    q_TO, k_TO, v_TO, _ = case.projected_TO.clone().split(split, dim=-1)
    q_THD, k_TGD, v_TGD = (x.unflatten(-1, (-1, head_dim)) for x in (q_TO, k_TO, v_TO))
    if norm != "none":
        normalise = (rms_norm if norm == "rms" else rms_norm_zero_centered).reference
        q_THD, k_TGD = normalise(q_THD, case.norm.q_D, EPS), normalise(k_TGD, case.norm.k_D, EPS)
    if is_rotated:
        q_THD, k_TGD = apply_rotary(q_THD, case.rotary), apply_rotary(k_TGD, case.rotary)
    expected = [memory.clone() for memory in (case.memory.k_BPGD, case.memory.v_BPGD)]
    for memory, new_TGD in zip(expected, (k_TGD, v_TGD), strict=True):
        for row, (block, offset) in enumerate(zip(blocks, [63, 0, 7, 1], strict=True)):
            if block:
                memory[block, offset] = new_TGD[row]
    out_THD = prepare_qkv(
        *case.projected_TO.split(split, dim=-1)[:3],
        None if norm == "none" else case.norm._replace(is_zero_centered=norm != "rms"),
        case.rotary if is_rotated else None,
        case.memory,
        case.batch,
    )
    torch.testing.assert_close(out_THD, q_THD)
    torch.testing.assert_close(case.memory.k_BPGD, expected[0], equal_nan=True)
    torch.testing.assert_close(case.memory.v_BPGD, expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[1, 3, 3, 4], [2, 0, 0, 1]])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.004, 3.0)])
def test_e4m3_stores_rounded_and_limited_numbers(
    blocks: list[int], dtype: torch.dtype, scales: tuple[float, float]
) -> None:
    offsets = [63, 0, 7, 1]
    case = make_case(blocks, offsets, dtype=dtype, scales=scales)
    num_kv_heads, head_dim = case.memory.k_BPGD.shape[2:]
    split = [case.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim, 5]
    q_TO, k_TO, v_TO, _ = case.projected_TO.split(split, dim=-1)
    before = [x.view(torch.uint8).clone() for x in (case.memory.k_BPGD, case.memory.v_BPGD)]
    prepare_qkv(q_TO, k_TO, v_TO, None, case.rotary, case.memory, case.batch)
    k_TGD, v_TGD = (x.unflatten(-1, (-1, head_dim)) for x in (k_TO, v_TO))
    rotated_TGD = apply_rotary(k_TGD.clone(), case.rotary)
    kept = (case.memory.k_BPGD, case.memory.v_BPGD)
    is_written = torch.zeros(kept[0].shape[:2], dtype=torch.bool)
    for memory, new_TGD, scale in zip(kept, (rotated_TGD, v_TGD), scales, strict=True):
        for row, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
            if block:
                is_written[block, offset] = True
                expected = (new_TGD[row].float() / scale).clamp(-448, 448)
                found = memory[block, offset].float()
                # Half of the last of four places, or of the smallest number; and what rounded the input.
                assert bool(((found - expected).abs() <= expected.abs() * (2**-4 + 2**-8) + 2**-10).all())
                assert bool((found.abs() <= 448).all())
    for memory, old in zip(kept, before, strict=True):
        assert torch.equal(memory.view(torch.uint8)[~is_written], old[~is_written])
