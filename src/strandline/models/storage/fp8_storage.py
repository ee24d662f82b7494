"""Keeps weights that are published in FP8 as they are: e4m3 on the model's device, and their scales.

Which rows stay follows from the files (``kept_rows.py``). Blocks of other than ``GROUP`` columns do not stay.

Shape suffixes: R rows of all matrices of a parameter, I inputs, X groups of inputs, Y blocks of rows.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from strandline.kernels.gemm.weights import ScaledWeight
from strandline.kernels.rowwise.quantized_rows import GROUP, MIN_SCALE
from strandline.models.layers.projection import GatedProjection, Projection
from strandline.models.layers.targets import Piece, Read, Target
from strandline.models.storage.kept_rows import (
    Kept,
    Matrices,
    Matrix,
    copy_rows,
    is_gate_up,
    keep_experts,
    range_of,
    rows_and_sources,
)
from strandline.models.storage.quantization_config import Block, Quantization

CHUNK_ELEMENTS = 2**22
"""Elements that are put in another order at a time."""

RANDOM_SCALE: Final = 96.0
"""Standard deviation of random e4m3 weights; the largest is 448."""


def can_keep(quantization: Quantization) -> bool:
    """Return whether kernels multiply with weights whose scales cover such blocks."""
    return all(block.columns in (None, GROUP) for block in quantization.blocks)


@dataclass(eq=False)
class _Memory:
    """The memory of a matrix's rows."""

    values_RI: Tensor
    scales_RX: Tensor
    """On the host, a scale for every row in FP8."""
    dense_RI: Tensor

    @classmethod
    def of(cls, matrix: Matrix, device: torch.device | str) -> "_Memory":
        num_fp8, num_inputs = matrix.num_quantized, matrix.parameter.shape[-1]
        options: dict[str, Any] = {"device": device}
        values_RI = torch.empty(num_fp8, num_inputs, dtype=torch.float8_e4m3fn, **options)
        return cls(values_RI, torch.empty(num_fp8, -(-num_inputs // GROUP)), matrix.allocate_dense(device))


class Fp8Storage:
    """The matrices of a model that stay in FP8.

    Args:
        targets: of the model, which was built without memory for matrices.
        quantized: names of the published tensors in FP8.
        device: where the matrices go. Those that do not stay in FP8 get memory for all their rows.
    """

    def __init__(
        self, model: nn.Module, targets: Mapping[str, Target], quantized: Collection[str], device: torch.device | str
    ) -> None:
        self._targets = targets
        self._matrices = Matrices(model, targets, quantized, _cuts_blocks, device)
        self._memory = {matrix: _Memory.of(matrix, device) for matrix in self._matrices.kept}
        self.names = self._matrices.names
        """Published tensors that ``fill`` takes."""
        self.kept = self.names.intersection(quantized)
        """Those that stay in FP8."""

    def fill(self, name: str, read: Read, scales: tuple[Block, Tensor] | None) -> None:
        """Copy what is used of a published tensor.

        Args:
            scales: what one scale covers, and the scales ``[..., Y, X]`` of the whole tensor; None: it is not in FP8.
        """
        target = self._targets[name]
        matrix = self._matrices.kept_of(target)
        assert matrix is not None
        memory = self._memory[matrix]
        for piece in target.pieces:
            published = read(piece.index)
            rows_R, source_R = rows_and_sources(piece, published.shape, len(matrix.is_quantized_R))
            place_R = matrix.place_R[rows_R]
            published_RI = published.reshape(-1, published.shape[-1])
            if scales is None:
                dense_RI = published_RI.to(memory.dense_RI.dtype)
                copy_rows(memory.dense_RI, place_R, dense_RI, source_R, CHUNK_ELEMENTS)
                continue
            scales_RX = _scales_of(piece, target, *scales).expand(-1, memory.scales_RX.shape[1])
            bytes_RI = published_RI.view(torch.uint8)
            copy_rows(memory.values_RI.view(torch.uint8), place_R, bytes_RI, source_R, CHUNK_ELEMENTS)
            copy_rows(memory.scales_RX, place_R, scales_RX, source_R, CHUNK_ELEMENTS)

    def fill_randomly(self, seed: int) -> None:
        """Draw random weights, and scales that vary from block to block."""
        for index, (matrix, memory) in enumerate(self._memory.items()):
            generator = torch.Generator(memory.values_RI.device).manual_seed(seed + index)
            std = matrix.parameter.shape[-1] ** -0.5
            for rows in memory.values_RI.split(max(1, 2**26 // matrix.parameter.shape[-1])):
                noise = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device).normal_(generator=generator)
                rows.copy_(noise.mul_(RANDOM_SCALE).clamp_(-448, 448))
            memory.dense_RI.normal_(generator=generator).mul_(std)
            blocks = torch.rand(-(-len(memory.scales_RX) // GROUP), memory.scales_RX.shape[1])
            blocks = (blocks + 0.5) * max(std / RANDOM_SCALE, MIN_SCALE)
            memory.scales_RX = blocks.repeat_interleave(GROUP, 0)[: len(memory.scales_RX)]

    def finish(self) -> None:
        """Give the filled weights to their layers."""
        experts = dict[nn.Module, dict[str, Kept]]()
        for matrix, memory in self._memory.items():
            values_RI, scales_RX = memory.values_RI, memory.scales_RX
            if isinstance(matrix.owner, Projection):
                boundary = len(matrix.is_quantized_R) // 2 if isinstance(matrix.owner, GatedProjection) else 0
                matrix.keep(memory.dense_RI, partial(_scaled_rows, memory, boundary))
                continue
            *outer, num_rows, _ = matrix.parameter.shape
            values, scales = values_RI.view(matrix.parameter.shape), scales_RX.view(*outer, num_rows, -1)
            boundary = num_rows // 2 if is_gate_up(matrix) else 0
            experts.setdefault(matrix.owner, {})[matrix.attribute] = _scaled(values, scales, boundary)
        keep_experts(experts)


def _scaled_rows(memory: _Memory, boundary: int, rows: slice) -> ScaledWeight:
    return _scaled(memory.values_RI[rows], memory.scales_RX[rows], boundary)


def _scaled(values: Tensor, scales: Tensor, boundary: int) -> ScaledWeight:
    """Return a weight with as few scales as say the same.

    Args:
        scales: one for every row and group.
        boundary: a row at which scales must start; 0: anywhere.
    """
    num_rows = scales.shape[-2]
    rows = math.gcd(boundary, GROUP)
    while not torch.equal(scales[..., ::rows, :].repeat_interleave(rows, -2)[..., :num_rows, :], scales):
        rows //= 2
    scales = scales[..., ::rows, :].contiguous()
    num_groups = scales.shape[-1]
    if bool((scales == scales[..., :1]).all()):
        return ScaledWeight(values, scales[..., :1].to(values.device).expand(*scales.shape[:-1], num_groups), rows)
    return ScaledWeight(values, scales.to(values.device), rows)


def _cuts_blocks(piece: Piece, target: Target) -> bool:
    """Return whether ``GROUP`` inputs of a piece, or of another shard's, lie in two blocks of the published tensor."""
    if len(piece.index) < len(target.shape):
        return False
    inputs = range_of(piece.index[-1], target.shape[-1])
    return target.shape[-1] > GROUP and len(inputs) % GROUP > 0


def _scales_of(piece: Piece, target: Target, block: Block, scale_YX: Tensor) -> Tensor:
    """Return a scale for every row and group of inputs of a piece; one column if a scale covers whole rows."""
    index = (*piece.index, *[slice(None)] * (len(target.shape) - len(piece.index)))
    rows, inputs = (range_of(part, size) for part, size in zip(index[-2:], target.shape[-2:], strict=True))
    row_R = torch.arange(rows.start, rows.stop) // (block.rows or target.shape[-2])
    scales_RX = scale_YX[index[:-2]].float().cpu()[..., row_R, :].flatten(0, -2)
    return scales_RX[:, inputs.start // GROUP : inputs[-1] // GROUP + 1] if block.columns else scales_RX
