"""Weights in microscaling formats as files hold them: NVFP4 and MXFP4 (e2m1, two codes to a byte, the earlier input in
its low bits) and MXFP8 (e4m3).

A weight is ``code * scale * factor``: a scale covers a group of neighbouring inputs of a row, a factor a whole matrix.

| files | codes | scales | factor |
| --- | --- | --- | --- |
| ModelOpt, NVFP4 | ``M.weight`` | ``M.weight_scale``, e4m3, of 16 inputs | ``M.weight_scale_2`` |
| compressed-tensors, NVFP4 | ``M.weight_packed`` | the same | 1 / ``M.weight_global_scale`` |
| gpt-oss, MXFP4 | ``E_blocks``, groups in a dimension of their own | ``E_scales``, uint8 exponents | 1 |
| compressed-tensors, MXFP4 | ``M.weight_packed`` | ``M.weight_scale``, uint8 exponents, of 32 inputs | 1 |
| MXFP8 | ``M.weight``, e4m3 | ``M.weight_scale`` or ``M.weight_scale_inv``, uint8 exponents, of 32 inputs | 1 |

Experts in one tensor have one dimension more, and a factor each. The files decide, tensor by tensor, what is quantised.

Source: the published layouts of ModelOpt (``NVFP4``, ``W4A16_NVFP4``, ``MXFP8``), and ``nvfp4-pack-quantized``,
``mxfp4-pack-quantized`` and ``mxfp8-quantized`` of compressed-tensors; Open Compute Project, "OCP Microscaling Formats
(MX) Specification".

Shape suffixes: N rows, K inputs, X groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.kernels.gemm.formats.coded import scale_numbers
from strandline.kernels.gemm.formats.fp4 import E2M1
from strandline.kernels.rowwise.quantized_rows import MAX_E4M3
from strandline.models.layers.targets import Index, Target
from strandline.models.storage.fp8 import CHUNK_ELEMENTS, SCALE_SUFFIXES
from strandline.models.storage.published import Holders, check_published_shape
from strandline.models.storage.quantization_config import MicroscaledLayout, MicroscaledScheme
from strandline.models.storage.scales import check_scale
from strandline.models.storage.weights_files import WeightsFile

MAX_WEIGHT: Final = 4096.0
"""No model has larger weights; files whose factor is the reciprocal of what it should be have."""

E8M0_NAN: Final = 255
"""The exponent that stands for no number."""

E4M3_NAN: Final = 0x7F
"""The code that stands for no number, without its sign."""


@dataclass(frozen=True, slots=True)
class _Suffixes:
    """What follows the name of a module, or of a tensor of experts, in the names of a weight's parts."""

    codes: str
    scales: tuple[str, ...]
    """One of these."""
    factor: str | None
    activations: tuple[str, ...]


SUFFIXES: Final[Mapping[MicroscaledLayout, _Suffixes]] = {
    "modelopt": _Suffixes("", ("_scale",), "_scale_2", ("input_scale",)),
    "nvfp4-pack-quantized": _Suffixes("_packed", ("_scale",), "_global_scale", ("input_global_scale",)),
    "mxfp4-pack-quantized": _Suffixes("_packed", ("_scale",), None, ()),
    "mxfp4": _Suffixes("_blocks", ("_scales",), None, ()),
    "mxfp8": _Suffixes("", SCALE_SUFFIXES[::-1], None, ("input_scale",)),
}
"""Added to the name of the weight; those of scales of activations replace ``weight`` at its end."""


def find_microscaled(holders: Holders, scheme: MicroscaledScheme) -> dict[str, "PublishedMicroscaled"]:
    """Return the weights in a microscaling format, by their names in a model that is not quantised."""
    suffix, dtype = SUFFIXES[scheme.layout].codes, scheme.codes_dtype
    names = [name for name, file in holders.items() if name.endswith(suffix) and file.dtype(name) == dtype]
    found = (PublishedMicroscaled(name.removesuffix(suffix), scheme, holders) for name in names)
    # Bytes need more than a name: indices have them, too.
    is_known = suffix != "" or scheme.bits == 8
    return {weight.name: weight for weight in found if is_known or {weight.scales, weight.factor} & holders.keys()}


@dataclass(frozen=True, slots=True)
class PublishedMicroscaled:
    """A weight in a microscaling format, and its scales."""

    name: str
    scheme: MicroscaledScheme
    holders: Holders

    @property
    def codes(self) -> str:
        """Name of the tensor of codes."""
        return self.name + SUFFIXES[self.scheme.layout].codes

    @property
    def scales(self) -> str:
        """Name of the tensor of scales."""
        names = [self.name + suffix for suffix in SUFFIXES[self.scheme.layout].scales]
        return next((name for name in names if name in self.holders), names[0])

    @property
    def factor(self) -> str | None:
        """Name of the tensor that holds the factor, or its reciprocal; None if there is no factor."""
        suffix = SUFFIXES[self.scheme.layout].factor
        return None if suffix is None else self.name + suffix

    @property
    def has_own_scales(self) -> bool:
        """See ``PublishedWeight``: where they are no exponents, a weight of 8 bits is in FP8."""
        return self.scales in self.holders and self.holders[self.scales].dtype(self.scales) in self.scheme.scale_dtypes

    @property
    def _shape(self) -> str:
        """Name of the tensor that repeats the shape, which few files have."""
        return f"{self.name}_shape"

    @property
    def _activations(self) -> list[str]:
        """Names of the published scales of activations."""
        module, _, kind = self.name.rpartition("weight")
        suffixes = SUFFIXES[self.scheme.layout].activations if kind == "" and module else ()
        return [module + suffix for suffix in suffixes if module + suffix in self.holders]

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``PublishedWeight``."""
        factor = [] if self.factor is None else [self.factor]
        parts = (name for name in (self.scales, *factor, self._shape) if name in self.holders)
        return (self.codes, *parts, *self._activations)

    def check(self, target: Target) -> None:
        """See ``PublishedWeight``."""
        for part in (self.scales, self.factor):
            if part is not None and part not in self.holders:
                raise WeightsError(f"{part} is missing beside {self.codes}")
        *outer, num_rows, num_inputs = (1, *target.shape) if len(target.shape) < 2 else target.shape
        if len(target.shape) < 2 or num_inputs % self.scheme.group:
            raise WeightsError(
                f"{self.codes} stands for a weight of shape {list(target.shape)}; in {self.scheme.kind} are matrices, "
                f"whose inputs are a multiple of {self.scheme.group}"
            )
        in_groups = self.scheme.byte_groups
        num_bytes = num_inputs * self.scheme.bits // 8
        packed = (num_bytes,) if in_groups is None else (num_inputs // in_groups, in_groups // 2)
        self._check_shape(self.codes, (*outer, num_rows, *packed))
        self._check_shape(self.scales, (*outer, num_rows, num_inputs // self.scheme.group))
        dtype, wanted = self.holders[self.scales].dtype(self.scales), self.scheme.scale_dtypes
        if dtype not in wanted:
            raise WeightsError(f"{self.scales} is stored as {dtype}; scales of {self.scheme} are {' or '.join(wanted)}")

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        shape = self.holders[name].shape(name)
        if tuple(shape) != wanted:
            raise WeightsError(f"{name} has shape {shape}; the configuration and {self.scheme} ask for {list(wanted)}")

    def open(self, target: Target, device: torch.device | str) -> "OpenMicroscaledWeight":
        """See ``PublishedWeight``."""
        outer = target.shape[:-2]
        if self._shape in self.holders:
            check_published_shape(self._shape, self.holders, target.shape)
        for name in self._activations:
            self._read_numbers(name, outer)
        scale_NX = self.holders[self.scales].get(self.scales)
        scale_NX = scale_NX.view(torch.uint8) if self.scheme.has_exponents else scale_NX
        factor = self._read_factor(outer)
        numbers_NX = scale_numbers(scale_NX)
        if bool((numbers_NX < 0).any()):
            raise WeightsError(f"{self.scales} has negative scales")
        if not bool(numbers_NX.isfinite().all()) or (self.scheme.has_exponents and bool((scale_NX == E8M0_NAN).any())):
            raise WeightsError(f"{self.scales} has scales that are not numbers")
        largest = numbers_NX.amax()
        bound = float(largest * factor.max()) * (MAX_E4M3 if self.scheme.bits == 8 else E2M1[-1])
        if bound > MAX_WEIGHT:
            source = self.scales if self.factor is None else self.factor
            raise WeightsError(f"{source} makes weights of up to {bound:.3g} of {self.codes}; limit: {MAX_WEIGHT}")
        return OpenMicroscaledWeight(self, self.holders[self.codes], scale_NX, factor, target.shape, device)

    def _read_factor(self, outer: tuple[int, ...]) -> Tensor:
        """Return the factor of each matrix, float32, of the dimensions before rows and inputs."""
        if self.factor is None:
            return torch.ones(outer)
        numbers = self._read_numbers(self.factor, outer)
        return numbers if self.scheme.layout == "modelopt" else numbers.reciprocal()

    def _read_numbers(self, name: str, outer: tuple[int, ...]) -> Tensor:
        """Return one positive number for each matrix; a single one may be of all."""
        numbers = self.holders[name].get(name)
        if numbers.numel() not in {1, torch.Size(outer).numel()}:
            raise WeightsError(f"{name} has shape {list(numbers.shape)}; a matrix has one")
        return check_scale(name, numbers).flatten().expand(torch.Size(outer).numel()).reshape(outer)


@dataclass(frozen=True, slots=True, eq=False)
class OpenMicroscaledWeight:
    """A weight whose codes are read part by part."""

    published: PublishedMicroscaled
    file: WeightsFile
    scale_NX: Tensor
    """``[..., N, X]``, as published, on the host."""
    factor: Tensor
    """``[...]``, float32, on the host."""
    shape: tuple[int, ...]
    device: torch.device | str

    def part(self, index: Index) -> tuple[Tensor, Tensor, Tensor]:
        """Read a part, ``[rows, inputs]``, the dimensions before rows flattened.

        Returns: uint8 codes, the scale of each row and group that has some of the inputs, as published, and a float32
        factor for each row; all on the device.

        Raises:
            WeightsError: a number in e4m3 is NaN.
        """
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        inputs = range(*index[-1].indices(self.shape[-1]))
        scheme, group = self.published.scheme, self.published.scheme.group
        unit = scheme.byte_groups or 8 // scheme.bits
        first = inputs.start % unit
        read = (*index[:-1], slice(inputs.start // unit, -(-inputs.stop // unit)))
        code_NK = self.file.get(self.published.codes, read).to(self.device).view(torch.uint8)
        code_NK = (code_NK if scheme.byte_groups is None else code_NK.flatten(-2)).flatten(0, -2)
        if scheme.bits == 8:
            self._check_numbers(code_NK)
        else:
            code_NK = torch.stack((code_NK & 15, code_NK >> 4), dim=-1).flatten(-2)[:, first : first + len(inputs)]
        scale_NX = self.scale_NX[index[:-1]][..., inputs.start // group : -(-inputs.stop // group)].to(self.device)
        factor = self.factor[index[:-2]].to(self.device)
        rows = scale_NX.shape[-2]
        return code_NK, scale_NX.flatten(0, -2), factor.flatten().repeat_interleave(rows)

    def _check_numbers(self, code_NK: Tensor) -> None:
        """Raise WeightsError if a number is NaN: kernels, which shift bits, would take it for 480."""
        num_rows = max(1, CHUNK_ELEMENTS // max(1, code_NK.shape[1]))
        if any(bool(((rows & E4M3_NAN) == E4M3_NAN).any()) for rows in code_NK.split(num_rows)):
            raise WeightsError(f"{self.published.codes} holds a weight that is not a number")

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """See ``OpenWeight``; computed in float32, ``CHUNK_ELEMENTS`` at a time."""
        code_NK, scale_NX, factor_N = self.part(index)
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        inputs = range(*index[-1].indices(self.shape[-1]))
        group = self.published.scheme.group
        group_K = torch.arange(inputs.start, inputs.stop, device=code_NK.device) // group - inputs.start // group
        out_NK = torch.empty_like(code_NK, dtype=dtype)
        step = max(1, CHUNK_ELEMENTS // max(1, len(inputs)))
        for start in range(0, len(out_NK), step):
            rows = slice(start, start + step)
            scaled_NX = scale_numbers(scale_NX[rows]) * factor_N[rows, None]
            out_NK[rows] = _numbers(code_NK[rows], self.published.scheme.bits).mul_(scaled_NX[:, group_K])
        outer = [len(range(*part.indices(size))) for part, size in zip(index[:-1], self.shape[:-1], strict=True)]
        return out_NK.view(*outer, len(inputs))


def _numbers(codes: Tensor, bits: int) -> Tensor:
    """Return what codes stand for, in float32."""
    if bits == 8:
        return codes.view(torch.float8_e4m3fn).float()
    return torch.tensor((*E2M1, *(-number for number in E2M1)), device=codes.device)[codes.int()]
