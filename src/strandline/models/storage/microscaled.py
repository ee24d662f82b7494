"""Weights in microscaling formats (NVFP4, MXFP4, MXFP8) as files hold them (``layouts.py``), and how they stay so.

A weight is ``number * scale * factor``: a scale covers a group of neighbouring inputs of a row, a factor the matrix.
Experts in one tensor have one dimension more, and a factor each. The files decide, tensor by tensor, what is quantised.
Weights that other ranks share stay as they are if their parts begin and end with groups.

Shape suffixes: N rows, K inputs, X groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.kernels.gemm.formats.coded import PACKED_SCALES, scale_numbers
from strandline.models.layers.parts.targets import Index, Target
from strandline.models.storage.coded_storage import StoredCodes
from strandline.models.storage.codes import Codes
from strandline.models.storage.fp8 import CHUNK_ELEMENTS
from strandline.models.storage.layouts import Layout
from strandline.models.storage.published import Holders, check_published_shape
from strandline.models.storage.scales import check_scale
from strandline.models.storage.stored_rows import range_of
from strandline.models.storage.weights_files import WeightsFile

MAX_WEIGHT: Final = 4096.0
"""No model has larger weights; files whose factor is the reciprocal of what it should be have."""

E8M0_NAN: Final = 255
"""The exponent that stands for no number."""


@dataclass(frozen=True, slots=True)
class MicroscaledFormat:
    """See ``WeightFormat``."""

    scheme: Layout
    can_stay: ClassVar[bool] = True
    has_e4m3: ClassVar[bool] = False
    """Kernels shift the bits of numbers and scales."""

    @property
    def kind(self) -> str:
        """Its name in messages."""
        return self.scheme.format.name

    @property
    def bits(self) -> int:
        """Size of a weight, without scales."""
        return self.scheme.format.bits

    def find(self, holders: Holders) -> Mapping[str, "PublishedMicroscaled"]:
        """See ``WeightFormat``."""
        return find_microscaled(holders, self.scheme)

    def can_store(self, weight: "PublishedMicroscaled", target: Target) -> bool:
        """See ``WeightFormat``."""
        return True

    def stored(self, weights: Mapping[str, "PublishedMicroscaled"]) -> StoredCodes:
        """See ``WeightFormat``."""
        scale_dtype = torch.uint8 if self.scheme.has_exponents else PACKED_SCALES
        return StoredCodes(self.scheme.format, self.scheme.group, scale_dtype)

    def stored_randomly(self, dtype: torch.dtype) -> StoredCodes:
        """See ``WeightFormat``; scales have their own dtype."""
        return self.stored({})


def find_microscaled(holders: Holders, layout: Layout) -> dict[str, "PublishedMicroscaled"]:
    """Return the weights in a microscaling format, by their names in a model that is not quantised."""
    suffix, dtype = layout.codes, layout.bytes.dtype
    names = [name for name, file in holders.items() if name.endswith(suffix) and file.dtype(name) == dtype]
    found = (PublishedMicroscaled(name.removesuffix(suffix), layout, holders) for name in names)
    # Bytes need more than a name: indices have them, too.
    is_known = suffix != "" or dtype != "U8"
    return {weight.name: weight for weight in found if is_known or {weight.scales, weight.factor} & holders.keys()}


@dataclass(frozen=True, slots=True)
class PublishedMicroscaled:
    """A weight in a microscaling format, and its scales."""

    name: str
    layout: Layout
    holders: Holders

    @property
    def codes(self) -> str:
        """Name of the tensor of codes."""
        return self.name + self.layout.codes

    @property
    def scales(self) -> str:
        """Name of the tensor of scales."""
        names = [self.name + suffix for suffix in self.layout.scales]
        return next((name for name in names if name in self.holders), names[0])

    @property
    def factor(self) -> str | None:
        """Name of the tensor that holds the factor, or its reciprocal; None if there is no factor."""
        suffix = self.layout.factor
        return None if suffix is None else self.name + suffix

    @property
    def has_own_scales(self) -> bool:
        """See ``PublishedWeight``: where they are no exponents, a weight of 8 bits is in FP8."""
        return self.scales in self.holders and self.holders[self.scales].dtype(self.scales) in self.layout.scale_dtypes

    @property
    def _shape(self) -> str:
        """Name of the tensor that repeats the shape, which few files have."""
        return f"{self.name}_shape"

    @property
    def _activations(self) -> list[str]:
        """Names of the published scales of activations."""
        module, _, kind = self.name.rpartition("weight")
        suffixes = self.layout.activations if kind == "" and module else ()
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
        if len(target.shape) < 2 or num_inputs % self.layout.group:
            raise WeightsError(
                f"{self.codes} stands for a weight of shape {list(target.shape)}; in {self.layout.kind} are matrices, "
                f"whose inputs are a multiple of {self.layout.group}"
            )
        num_groups, num_bytes = num_inputs // self.layout.group, num_inputs * self.layout.format.bits // 8
        packed = (num_groups, num_bytes // num_groups) if self.layout.has_group_dimension else (num_bytes,)
        self._check_shape(self.codes, (*outer, num_rows, *packed))
        self._check_shape(self.scales, (*outer, num_rows, num_groups))
        dtype, wanted = self.holders[self.scales].dtype(self.scales), self.layout.scale_dtypes
        if dtype not in wanted:
            raise WeightsError(f"{self.scales} is stored as {dtype}; scales of {self.layout} are {' or '.join(wanted)}")

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        shape = self.holders[name].shape(name)
        if tuple(shape) != wanted:
            raise WeightsError(f"{name} has shape {shape}; the configuration and {self.layout} ask for {list(wanted)}")

    def open(self, target: Target, device: torch.device | str) -> "OpenMicroscaledWeight":
        """See ``PublishedWeight``."""
        outer = target.shape[:-2]
        if self._shape in self.holders:
            check_published_shape(self._shape, self.holders, target.shape)
        for name in self._activations:
            self._read_numbers(name, outer)
        scale_NX = self.holders[self.scales].get(self.scales)
        scale_NX = scale_NX.view(torch.uint8) if self.layout.has_exponents else scale_NX
        factor = self._read_factor(outer)
        numbers_NX = scale_numbers(scale_NX)
        if bool((numbers_NX < 0).any()):
            raise WeightsError(f"{self.scales} has negative scales")
        if not bool(numbers_NX.isfinite().all()) or (self.layout.has_exponents and bool((scale_NX == E8M0_NAN).any())):
            raise WeightsError(f"{self.scales} has scales that are not numbers")
        largest, most = numbers_NX.amax(), self.layout.format.largest
        bound = 0.0 if most is None else float(largest * factor.max()) * most
        if bound > MAX_WEIGHT:
            source = self.scales if self.factor is None else self.factor
            raise WeightsError(f"{source} makes weights of up to {bound:.3g} of {self.codes}; limit: {MAX_WEIGHT}")
        return OpenMicroscaledWeight(self, self.holders[self.codes], scale_NX, factor, target.shape, device)

    def _read_factor(self, outer: tuple[int, ...]) -> Tensor:
        """Return the factor of each matrix, float32, of the dimensions before rows and inputs."""
        if self.factor is None:
            return torch.ones(outer)
        numbers = self._read_numbers(self.factor, outer)
        return numbers.reciprocal() if self.layout.is_reciprocal else numbers

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

    def part(self, index: Index) -> Codes:
        """See ``OpenCodes``."""
        layout, group = self.published.layout, self.published.layout.group
        *rows, inputs = self._ranges(index)
        # Inputs of a unit are read together.
        unit = group if layout.has_group_dimension else layout.bytes.inputs
        per_unit = 1 if layout.has_group_dimension else layout.bytes.bytes
        first, read = inputs.start % unit, slice(inputs.start // unit * per_unit, -(-inputs.stop // unit) * per_unit)
        whole = tuple(slice(part.start, part.stop) for part in rows)
        bytes_NK = self.file.get(self.published.codes, (*whole, read)).to(self.device).view(torch.uint8)
        bytes_NK = (bytes_NK.flatten(-2) if layout.has_group_dimension else bytes_NK).flatten(0, -2)
        code_NK = layout.bytes.split(bytes_NK)[:, first : first + len(inputs)]
        self._check_numbers(code_NK)
        scale_NX = self.scale_NX[whole][..., inputs.start // group : -(-inputs.stop // group)].to(self.device)
        factor = self.factor[whole[:-1]].to(self.device).flatten().repeat_interleave(scale_NX.shape[-2])
        group_K = torch.arange(inputs.start, inputs.stop, device=self.device) // group - inputs.start // group
        return Codes(layout.format, code_NK, scale_NX.flatten(0, -2), group_K, factor_N=factor)

    def _ranges(self, index: Index) -> list[range]:
        whole = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        return [range_of(part, size) for part, size in zip(whole, self.shape, strict=True)]

    def _check_numbers(self, code_NK: Tensor) -> None:
        """Raise WeightsError if a number is NaN: kernels, which shift bits, would take it for another one."""
        wrong = self.published.layout.format.not_a_number
        num_rows = max(1, CHUNK_ELEMENTS // max(1, code_NK.shape[1]))
        if wrong is not None and any(bool(((rows & wrong) == wrong).any()) for rows in code_NK.split(num_rows)):
            raise WeightsError(f"{self.published.codes} holds a weight that is not a number")

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """See ``OpenWeight``."""
        return self.part(index).dequantize(dtype).view([len(part) for part in self._ranges(index)])
