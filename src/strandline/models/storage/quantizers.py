"""The formats that weights are converted to (``conversion.py``), by rounding to the nearest number without calibration.

| format | layout | a weight ``W`` becomes | scales |
| --- | --- | --- | --- |
| fp8 | ``fp8`` of ``transformers`` | ``W``, ``W_scale_inv`` | of blocks of 128 × 128: largest / 448 |
| mxfp8 | ``mxfp8-quantized`` | ``W``, ``W_scale`` | of 32 inputs: a power of two, not below largest / 448 |
| nvfp4 | ``nvfp4-pack-quantized`` | ``W_packed``, ``W_scale``, ``W_global_scale`` | of 16 inputs: largest / 6 |
| int4 | ``pack-quantized`` | ``W_packed``, ``W_scale``, ``W_shape`` | of 128 inputs: largest / 7.5 |

The last three are layouts of ``compressed-tensors``. In NVFP4 scales are multiplied with ``W_global_scale`` and rounded
to e4m3, so that the largest is 448. Projections that other loaders join get that of the largest of them.

Shape suffixes: N rows, K columns, Y and X blocks downwards and across, B rows and columns of a block, G inputs of a
group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strandline.kernels.gemm.formats.coded import E8M0_BIAS
from strandline.kernels.gemm.formats.four_bit import SYMMETRIC_ZERO
from strandline.kernels.gemm.formats.fp4 import E2M1
from strandline.kernels.rowwise.quantized_rows import MAX_E4M3
from strandline.models.storage.four_bit import PER_NUMBER
from strandline.models.storage.layouts import MXFP8_LAYOUT, NVFP4_COMPRESSED, PACKED_COMPRESSED, Layout
from strandline.models.storage.quantization_config import (
    Block,
    FourBitScheme,
    Fp8Scheme,
    Scheme,
)

BLOCK: Final = 128
SQUARE: Final = Block(BLOCK, BLOCK)

GROUP_INT4: Final = 128

SMALLEST: Final = 1e-30
"""Least largest weight of a matrix in FP4: its factor is finite."""

Parts = dict[str, Tensor]
"""Tensors by what follows the weight's name in theirs."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Some rows of a matrix."""

    parts: Parts
    """Have these rows, or blocks of them, as their first dimension."""
    restored_NK: Tensor
    """The float32 weights that the parts stand for."""


class Quantizer(Protocol):
    """A format that weights are converted to."""

    @property
    def multiple(self) -> int:
        """The inputs of a matrix are a multiple of this."""

    @property
    def takes_drafts(self) -> bool:
        """Whether published models have draft layers in this format."""

    @property
    def has_factor(self) -> bool:
        """Whether all matrices that other loaders take as one are scaled by the largest weight of all."""

    def quantize(self, weight_NK: Tensor, largest: Tensor) -> QuantizedRows:
        """Convert rows of a matrix, those of whole blocks.

        Args:
            weight_NK: finite; any dtype.
            largest: absolute weight, float32.
        """

    def once(self, shape: Sequence[int], largest: Tensor) -> Parts:
        """Return parts that have no rows, of a matrix, or of several in one tensor with a largest weight each."""

    def config(self, unconverted: Sequence[str]) -> dict[str, Any]:
        """Return ``quantization_config``, given the modules that are not converted."""


@dataclass(frozen=True, slots=True)
class Fp8Quantizer:
    """See ``Quantizer``."""

    block: Block = SQUARE
    """What one scale covers."""
    multiple: ClassVar[int] = 1
    takes_drafts: ClassVar[bool] = True
    has_factor: ClassVar[bool] = False

    def quantize(self, weight_NK: Tensor, largest: Tensor) -> QuantizedRows:
        """See ``Quantizer``."""
        num_rows, num_columns = weight_NK.shape
        rows, columns = self.block.rows or num_rows, self.block.columns or num_columns
        padded = F.pad(weight_NK.float(), (0, -num_columns % columns, 0, -num_rows % rows))
        blocks_YBXB = padded.view(padded.shape[0] // rows, rows, -1, columns)
        scale_YX = self._scales(blocks_YBXB.abs().amax((1, 3)) if self.block.rows else largest.view(1, 1))
        blocks_YBXB = blocks_YBXB / scale_YX[:, None, :, None]
        rounded_YBXB = blocks_YBXB.clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
        restored = (rounded_YBXB.float() * scale_YX[:, None, :, None]).view(padded.shape)
        quantized, restored = (x[:num_rows, :num_columns] for x in (rounded_YBXB.view(padded.shape), restored))
        scales = {"_scale_inv": scale_YX} if self.block.rows else {}
        return QuantizedRows({"": quantized.contiguous(), **scales}, restored)

    def once(self, shape: Sequence[int], largest: Tensor) -> Parts:
        """See ``Quantizer``."""
        return {} if self.block.rows else {"_scale_inv": self._scales(largest).reshape(-1)}

    def _scales(self, largest: Tensor) -> Tensor:
        return (largest / MAX_E4M3).clamp_(min=torch.finfo(torch.float32).tiny)

    def config(self, unconverted: Sequence[str]) -> dict[str, Any]:
        """See ``Quantizer``."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(unconverted),
        }


@dataclass(frozen=True, slots=True)
class Fp4Quantizer:
    """See ``Quantizer``."""

    layout: Layout = NVFP4_COMPRESSED
    multiple: ClassVar[int] = NVFP4_COMPRESSED.group
    takes_drafts: ClassVar[bool] = False
    has_factor: ClassVar[bool] = True

    def quantize(self, weight_NK: Tensor, largest: Tensor) -> QuantizedRows:
        """See ``Quantizer``."""
        weight_NXG = weight_NK.float().unflatten(1, (-1, self.layout.group))
        global_scale = _global_scale(largest)
        scale_NX = (weight_NXG.abs().amax(2) / E2M1[-1] * global_scale).clamp_(max=MAX_E4M3).to(torch.float8_e4m3fn)
        scaled_NX1 = (scale_NX.float() * global_scale.reciprocal()).unsqueeze(2)
        code_NXG = nearest_codes(weight_NXG / scaled_NX1.clamp(min=torch.finfo(torch.float32).tiny))
        table = torch.tensor((*E2M1, *(-number for number in E2M1)))
        restored_NK = (table[code_NXG.int()] * scaled_NX1).flatten(1)
        low, high = code_NXG.view(len(weight_NK), -1, 2).unbind(2)
        return QuantizedRows({self.layout.codes: low | high << 4, self.layout.scales[0]: scale_NX}, restored_NK)

    def once(self, shape: Sequence[int], largest: Tensor) -> Parts:
        """See ``Quantizer``."""
        scale = _global_scale(largest).reshape(-1)
        assert self.layout.factor is not None
        return {self.layout.factor: scale if self.layout.is_reciprocal else scale.reciprocal()}

    def config(self, unconverted: Sequence[str]) -> dict[str, Any]:
        """See ``Quantizer``."""
        weights = {"type": "float", "strategy": "tensor_group", "group_size": self.layout.group}
        return _announcement(self.layout, weights, unconverted)


@dataclass(frozen=True, slots=True)
class Mxfp8Quantizer:
    """See ``Quantizer``."""

    layout: ClassVar[Layout] = MXFP8_LAYOUT
    multiple: ClassVar[int] = MXFP8_LAYOUT.group
    takes_drafts: ClassVar[bool] = False
    has_factor: ClassVar[bool] = False

    def quantize(self, weight_NK: Tensor, largest: Tensor) -> QuantizedRows:
        """See ``Quantizer``. No number is clipped: a scale is rounded up."""
        weight_NXG = weight_NK.float().unflatten(1, (-1, self.layout.group))
        mantissa_NX, exponent_NX = torch.frexp(weight_NXG.abs().amax(2) / MAX_E4M3)
        exponent_NX = (exponent_NX - (mantissa_NX == 0.5).int()).clamp_(min=-E8M0_BIAS)
        scale_NX1 = torch.ldexp(torch.ones(exponent_NX.shape), exponent_NX).unsqueeze(2)
        rounded_NXG = (weight_NXG / scale_NX1).to(torch.float8_e4m3fn)
        restored_NK = (rounded_NXG.float() * scale_NX1).flatten(1)
        exponent_NX = (exponent_NX + E8M0_BIAS).to(torch.uint8)
        parts = {self.layout.codes: rounded_NXG.flatten(1), self.layout.scales[0]: exponent_NX}
        return QuantizedRows(parts, restored_NK)

    def once(self, shape: Sequence[int], largest: Tensor) -> Parts:
        """See ``Quantizer``."""
        return {}

    def config(self, unconverted: Sequence[str]) -> dict[str, Any]:
        """See ``Quantizer``."""
        weights = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": self.layout.group}
        return _announcement(self.layout, {**weights, "scale_dtype": "torch.uint8"}, unconverted)


@dataclass(frozen=True, slots=True)
class Int4Quantizer:
    """See ``Quantizer``."""

    group: int = GROUP_INT4
    parts: ClassVar[Mapping[str, str]] = PACKED_COMPRESSED.parts
    takes_drafts: ClassVar[bool] = False
    has_factor: ClassVar[bool] = False

    @property
    def multiple(self) -> int:
        """See ``Quantizer``."""
        return self.group

    def quantize(self, weight_NK: Tensor, largest: Tensor) -> QuantizedRows:
        """See ``Quantizer``."""
        weight_NXG = weight_NK.float().unflatten(1, (-1, self.group))
        smallest = torch.finfo(weight_NK.dtype).tiny
        scale_NX = (weight_NXG.abs().amax(2) / (SYMMETRIC_ZERO - 0.5)).clamp_(min=smallest).to(weight_NK.dtype)
        scale_NX1 = scale_NX.float().unsqueeze(2)
        rounded_NXG = (weight_NXG / scale_NX1).round_().clamp_(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1)
        code_NK = (rounded_NXG + SYMMETRIC_ZERO).to(torch.int32).view(len(weight_NK), -1, PER_NUMBER)
        packed = (code_NK << torch.arange(0, 4 * PER_NUMBER, 4, dtype=torch.int32)).sum(2, dtype=torch.int32)
        return QuantizedRows(
            {self.parts["codes"]: packed, self.parts["scales"]: scale_NX}, (rounded_NXG * scale_NX1).flatten(1)
        )

    def once(self, shape: Sequence[int], largest: Tensor) -> Parts:
        """See ``Quantizer``."""
        return {self.parts["shape"]: torch.tensor(shape)}

    def config(self, unconverted: Sequence[str]) -> dict[str, Any]:
        """See ``Quantizer``."""
        weights = {"type": "int", "strategy": "group", "group_size": self.group}
        return _compressed("pack-quantized", weights, unconverted)


def quantizer_of(scheme: Scheme) -> Quantizer | None:
    """Return what converts weights to the format of a published model; None: nothing does."""
    match scheme:
        case Fp8Scheme():
            return Fp8Quantizer(scheme.blocks[0])
        case Layout() if scheme is MXFP8_LAYOUT:
            return Mxfp8Quantizer()
        case Layout() if not scheme.has_exponents:
            return Fp4Quantizer(scheme)
        case FourBitScheme(packing, (int(group), *_), has_zeros=False) if packing is PACKED_COMPRESSED:
            return Int4Quantizer(group)
    return None


QUANTIZERS: Final[Mapping[str, Quantizer]] = {
    "fp8": Fp8Quantizer(),
    "mxfp8": Mxfp8Quantizer(),
    "nvfp4": Fp4Quantizer(),
    "int4": Int4Quantizer(),
}


def _global_scale(largest: Tensor) -> Tensor:
    """Return what scales of FP4 are multiplied with, so that the largest is that of e4m3."""
    return MAX_E4M3 * E2M1[-1] / largest.clamp(min=SMALLEST)


def nearest_codes(x: Tensor) -> Tensor:
    """Return the FP4 codes of the nearest numbers; halfway between two, of that whose code is even."""
    numbers = torch.tensor(E2M1)
    bounds = (numbers[1:] + numbers[:-1]) / 2
    # The bounds are halfway; above every other one, a number there is rounded up.
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(()))
    return (torch.bucketize(x.abs(), bounds) | x.signbit().long() << 3).to(torch.uint8)


def _announcement(layout: Layout, weights: Mapping[str, Any], unconverted: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a layout: as compressed-tensors writes it, or else as ModelOpt does."""
    if layout.compressed is not None:
        return _compressed(layout.compressed, weights, unconverted)
    return {
        "quant_method": "modelopt",
        "quant_algo": layout.algorithms[0],
        "group_size": layout.group,
        "ignore": list(unconverted),
    }


def _compressed(format: str, weights: Mapping[str, Any], unconverted: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a format of ``compressed-tensors``."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "symmetric": True, "dynamic": False, **weights},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(unconverted),
        "kv_cache_scheme": None,
    }
