"""Queries, keys and values in Triton equal the torch version's; they are stored where they belong and nowhere else.

``check`` runs on any device; tests/gpu runs it at a model's shapes too.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from strandline.kernels.arena import NAN_BYTE, ArenaTensors
from strandline.kernels.attention import qkv
from strandline.kernels.attention.qkv import HeadNorm
from strandline.kernels.batch import AttentionBatch, KVMemory
from strandline.kernels.rowwise.rotary import default_frequencies, rotary_table
from strandline.specs import ModelSpec, kv_spec
from tests.poison import poisoned_memory

pytest.importorskip("triton")

from strandline.kernels.attention import qkv_triton

EPS = 1e-6


@dataclass
class Shape:
    """Heads, channels that turn, and the blocks that the rows are stored in."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    blocks: list[int]


def make_memory(shape: Shape, dtype: torch.dtype, device: str, scales: tuple[float, float] | None = None) -> KVMemory:
    kept_dtype = dtype if scales is None else torch.float8_e4m3fn
    layer = kv_spec(shape.num_kv_heads, shape.head_dim, str(kept_dtype).removeprefix("torch."))
    arena = ArenaTensors(ModelSpec((layer, layer), 4, "float32"), max(shape.blocks) + 2, device)
    arena.bytes.fill_(NAN_BYTE)
    streams = arena.layers[1].streams
    return KVMemory(streams["key"], streams["value"], *scales or (1.0, 1.0))


def make_batch(blocks: list[int], device: str) -> AttentionBatch:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return AttentionBatch(
        query_starts=(),
        context_lens=(),
        query_starts_N1=empty,
        context_lens_N=empty,
        block_table_NM=empty,
        write_blocks_T=torch.tensor(blocks, device=device),
        # Rows of one block never fall together, wherever the block comes up again.
        write_offsets_T=torch.tensor([(7 * row + 3) % 64 for row in range(len(blocks))], device=device),
        is_all_written=0 not in blocks,
    )


def near(actual: Tensor, expected: Tensor) -> None:
    """Compare; in bfloat16 another order of a sum flips a rounding, and the turn adds two such numbers.

    Triton's interpreter cuts bfloat16 off instead of rounding it.
    """
    tolerance = 3e-6 if expected.dtype == torch.float32 else 2**-6
    difference = (actual.double() - expected.double()).abs()
    scale = expected.double().abs().nan_to_num().amax()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert difference.nan_to_num().amax() <= tolerance * scale


def near_e4m3(actual: Tensor, expected: Tensor) -> None:
    """Compare; few numbers may be neighbours, where what is rounded differs in the last bits."""
    bits, expected_bits = (x.view(torch.uint8).int() for x in (actual, expected))
    difference = (bits - expected_bits).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.01


def check(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    is_apart: bool = False,
    norm: str = "zero-centred",
    is_rotated: bool = True,
    scales: tuple[float, float] | None = None,
) -> None:
    """Compare with the reference implementation.

    Args:
        norm: norm of heads: ``none``, ``rms`` or ``zero-centred``.
        is_apart: queries, keys and values are tensors of their own, not columns of one.
        scales: scales of keys and of values in e4m3; None: they are kept in ``dtype``.
    """
    num_tokens, head_dim = len(shape.blocks), shape.head_dim
    features = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    wide = torch.full((num_tokens, features + 24), torch.nan, dtype=dtype, device=device)
    projected_TO = wide[:, 8 : 8 + features + 5]
    projected_TO[:, :features] = torch.randn(num_tokens, features, device=device).to(dtype)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    head_norm = None if norm == "none" else HeadNorm(*weights, EPS, is_zero_centered=norm != "rms")
    positions_T = torch.randint(0, 5000, (num_tokens,), device=device)
    rotary = rotary_table.reference(positions_T, default_frequencies(1e4, shape.rotary_dim).to(device), 1.0)
    batch = make_batch(shape.blocks, device)
    widths = [shape.num_heads * head_dim, shape.num_kv_heads * head_dim, shape.num_kv_heads * head_dim, 5]
    rows = projected_TO.split(widths, dim=-1)[:3]
    if is_apart:
        rows = tuple(x.clone() for x in rows)
    results = []
    for operation in (qkv_triton.prepare_qkv, qkv.prepare_qkv.reference):
        memory = make_memory(shape, dtype, device, scales)
        before = projected_TO.clone()
        with poisoned_memory():
            q_THD = operation(*rows, head_norm, rotary if is_rotated else None, memory, batch)
        assert torch.equal(projected_TO[:, :features], before[:, :features])
        results.append((q_THD, memory.k_BPGD, memory.v_BPGD))
    (q, k, v), (expected_q, expected_k, expected_v) = results
    assert q.is_contiguous()
    assert q.shape == expected_q.shape
    near(q, expected_q)
    if scales is not None:
        near_e4m3(k, expected_k)
        near_e4m3(v, expected_v)
        return
    near(k, expected_k)
    assert torch.equal(v.view(torch.uint8), expected_v.view(torch.uint8))


SHAPES = [
    Shape(6, 2, 16, 8, [1, 3, 3, 4]),
    Shape(3, 1, 12, 12, [2, 0, 0, 1]),
    Shape(4, 4, 8, 2, [0, 0]),
    Shape(5, 1, 32, 16, [2]),
]


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.004, 3.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_e4m3_is_rounded_and_limited(shape: Shape, scales: tuple[float, float]) -> None:
    check(shape, torch.float32, "cpu", scales=scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_stored_where_they_belong_and_nowhere_else(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["none", "rms", "zero-centred"])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_norm_and_rotation_may_be_left_out(norm: str, is_rotated: bool, dtype: torch.dtype) -> None:
    check(SHAPES[0], dtype, "cpu", norm=norm, is_rotated=is_rotated)


def test_queries_keys_and_values_may_lie_apart() -> None:
    check(SHAPES[0], torch.float32, "cpu", is_apart=True)


def test_many_tokens_take_the_other_launch() -> None:
    num_tokens = qkv_triton.FEW_TOKENS + 1
    check(Shape(3, 1, 8, 4, [1 + row // 60 for row in range(num_tokens)]), torch.float32, "cpu")


def test_a_step_of_no_tokens_gives_nothing() -> None:
    shape = Shape(3, 1, 8, 4, [1])
    rotary = rotary_table.reference(torch.zeros(0), default_frequencies(1e4, 4), 1.0)
    weight_D = torch.randn(8)
    memory = make_memory(shape, torch.float32, "cpu")
    rows = torch.randn(0, 40).split([24, 8, 8], dim=-1)
    norm = HeadNorm(weight_D, weight_D, EPS, is_zero_centered=True)
    q_THD = qkv_triton.prepare_qkv(*rows, norm, rotary, memory, make_batch([], "cpu"))
    assert q_THD.shape == (0, 3, 8)
