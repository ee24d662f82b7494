"""Codes of published weights, unpacked, with their scales.

Shape suffixes: N rows, K inputs, X groups of inputs.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from strandline.kernels.gemm.formats.coded import CodedFormat, scale_numbers
from strandline.models.layers.parts.targets import Index
from strandline.models.storage.fp8 import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A matrix in codes, or a part of one: ``(number - zero) * scale * factor``. All is on one device."""

    format: CodedFormat
    code_NK: Tensor
    """uint8."""
    scale_NX: Tensor
    """In the published dtype; uint8 exponents."""
    group_K: Tensor
    """int64, the group of each input."""
    zero_NX: Tensor | None = None
    """uint8; None: all are 0."""
    factor_N: Tensor | None = None
    """float32; None: all are 1."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights, computed in float32, ``CHUNK_ELEMENTS`` at a time."""
        out_NK = torch.empty_like(self.code_NK, dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // max(1, self.code_NK.shape[1]))
        for start in range(0, len(out_NK), step):
            rows = slice(start, start + step)
            number_NK = self.format.numbers(self.code_NK[rows])
            if self.zero_NX is not None:
                number_NK.sub_(self.zero_NX[rows][:, self.group_K])
            scale_NX = scale_numbers(self.scale_NX[rows])
            if self.factor_N is not None:
                scale_NX = scale_NX * self.factor_N[rows, None]
            out_NK[rows] = number_NK.mul_(scale_NX[:, self.group_K])
        return out_NK


@runtime_checkable
class OpenCodes(Protocol):
    """A published weight whose codes are read part by part."""

    def part(self, index: Index) -> Codes:
        """Read a range of rows and of inputs, of several matrices one after the other.

        Raises:
            WeightsError: a code stands for no number.
        """
