"""Four-bit weights as files hold them: integers in int32, eight to a number, beside scales and zero points of groups.

A weight is ``(code - zero) * scale``; code and zero are numbers from 0 to 15. Inputs of a group follow one another, or
a published index says to which group each belongs. The files decide, tensor by tensor, what is quantised: they hold
other tensors (``layouts.py``) instead of ``M.weight``.

Zero points of the first version of gptq are published less one, modulo 16. Experts in one tensor, here ``W``, have one
dimension more; they are symmetric, and of compressed-tensors: ``W_packed`` and so on.

Shape suffixes: N rows, K inputs, X groups of inputs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.kernels.gemm.formats.coded import BLOCK_INPUTS
from strandline.kernels.gemm.formats.four_bit import FOUR_BIT, GROUPS_FOUR_BIT, SYMMETRIC_ZERO
from strandline.models.layers.parts.targets import Index, Target
from strandline.models.storage.coded_storage import StoredCodes
from strandline.models.storage.codes import Codes
from strandline.models.storage.layouts import PACKED_COMPRESSED, Packing
from strandline.models.storage.published import Holders, check_published_shape
from strandline.models.storage.quantization_config import FourBitScheme
from strandline.models.storage.scales import check_scale
from strandline.models.storage.weights_files import WeightsFile

PER_NUMBER: Final = 8
"""Codes in an int32."""

PACKED_DTYPE: Final = "I32"
"""As files name it."""

FP4_DTYPE: Final = "U8"
"""The dtype of codes in FP4, which have names of the same kind in compressed-tensors."""

SCALE_DTYPES: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Scales of several dtypes, or of others, are stored in float32."""

PackedNames = Mapping[str, str]
"""The published names of what a weight consists of, by the keys of ``Packing.parts``."""


def _is_supported(size: int | None) -> bool:
    return size is None or size in GROUPS_FOUR_BIT or size % BLOCK_INPUTS == 0


@dataclass(frozen=True, slots=True)
class FourBitFormat:
    """See ``WeightFormat``. Groups of a multiple of 128 inputs stay as several of 128 with the same scale."""

    scheme: FourBitScheme
    kind: ClassVar[str] = FOUR_BIT.name
    bits: ClassVar[int] = FOUR_BIT.bits
    has_e4m3: ClassVar[bool] = False

    @property
    def can_stay(self) -> bool:
        """Whether kernels multiply with weights of some of these group sizes."""
        return any(map(_is_supported, self.scheme.group_sizes))

    def find(self, holders: Holders) -> Mapping[str, "PublishedFourBit"]:
        """See ``WeightFormat``."""
        return find_four_bit(holders, self.scheme)

    def can_store(self, weight: "PublishedFourBit", target: Target) -> bool:
        """See ``WeightFormat``."""
        size = weight.group_size(target.shape)
        return size is not None and (size == target.shape[-1] or _is_supported(size))

    def stored(self, weights: Mapping[str, "PublishedFourBit"]) -> StoredCodes:
        """See ``WeightFormat``."""
        scales = [(weight.names["scales"], weight.holders) for weight in weights.values()]
        dtypes = {SCALE_DTYPES.get(holders[name].dtype(name), torch.float32) for name, holders in scales}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        return self._stored(dtype, has_zeros=any("zeros" in weight.names for weight in weights.values()))

    def stored_randomly(self, dtype: torch.dtype) -> StoredCodes:
        """See ``WeightFormat``."""
        return self._stored(dtype, has_zeros=self.scheme.has_zeros)

    def _stored(self, scale_dtype: torch.dtype, *, has_zeros: bool) -> StoredCodes:
        """Return the format for all supported group sizes."""
        sizes = [size for size in self.scheme.group_sizes if _is_supported(size)]
        group = min(size if size in GROUPS_FOUR_BIT else BLOCK_INPUTS for size in sizes)
        return StoredCodes(FOUR_BIT, group, scale_dtype, has_zeros, any(size is not None for size in sizes))


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A published matrix in 4 bits, or several in one tensor, whose codes are read part by part."""

    scale_NX: Tensor
    """``[..., N, X]``, finite and positive, in the published dtype."""
    zero_NX: Tensor
    """``[..., N, X]``, uint8."""
    group_K: Tensor
    """int64, the group of each input."""
    _codes: "_Codes"

    def part(self, index: Index) -> Codes:
        """See ``OpenCodes``; it has all groups."""
        *rows, inputs = self._whole(index)
        scale_NX, zero_NX = (tensor[tuple(rows)].flatten(0, -2) for tensor in (self.scale_NX, self.zero_NX))
        return Codes(FOUR_BIT, self._codes.read(rows, inputs), scale_NX, self.group_K[inputs], zero_NX)

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """See ``OpenWeight``."""
        ranges = (range(size)[part] for part, size in zip(self._whole(index), self._codes.shape, strict=True))
        return self.part(index).dequantize(dtype).view([len(part) for part in ranges])

    def _whole(self, index: Index) -> Index:
        return (*index, *[slice(None)] * (len(self._codes.shape) - len(index)))


def find_four_bit(holders: Holders, scheme: FourBitScheme) -> dict[str, "PublishedFourBit"]:
    """Return the weights in 4 bits, by their names in a model that is not quantised."""
    parts, replaced, found = scheme.packing.parts, scheme.packing.replaced, dict[str, PublishedFourBit]()
    for name, file in holders.items():
        stem = name.removesuffix(parts["codes"])
        if stem not in ("", name) and (not replaced or stem.endswith(".")) and file.dtype(name) != FP4_DTYPE:
            names = {key: stem + part for key, part in parts.items()}
            held = {key: part for key, part in names.items() if part in holders}
            found[stem + replaced] = PublishedFourBit(held, scheme, holders)
    return found


@dataclass(frozen=True, slots=True)
class PublishedFourBit:
    """A weight in 4 bits, and its scales, zero points and groups."""

    names: PackedNames
    scheme: FourBitScheme
    holders: Holders
    has_own_scales: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[str, ...]:
        """See ``PublishedWeight``."""
        return tuple(self.names.values())

    def check(self, target: Target) -> None:
        """See ``PublishedWeight``; ``open`` checks the shapes."""

    def open(self, target: Target, device: torch.device | str) -> "PackedMatrix":
        """See ``PublishedWeight``."""
        return open_packed(self.names, target.shape, self.scheme, self.holders, device)

    def group_size(self, shape: tuple[int, ...]) -> int | None:
        """Return how many inputs share a scale, in a weight of this shape; None if it is not known, or has no order."""
        if len(shape) < 2 or "scales" not in self.names:
            return None  # opening it will name the fault
        scales = self.names["scales"]
        size = group_size(self.holders[scales].shape(scales), shape, self.scheme)
        return size if size is not None and is_in_order(self.names, size, self.holders) else None


def group_size(scales: Sequence[int], shape: tuple[int, ...], scheme: FourBitScheme) -> int | None:
    """Return how many inputs of a matrix share a scale; None: the published scales have another shape.

    Args:
        scales: the shape of the published scales.
    """
    *outer, num_rows, num_inputs = shape
    for size in (size or num_inputs for size in scheme.group_sizes):
        count = -(-num_inputs // size)
        if tuple(scales) == ((*outer, num_rows, count) if scheme.packing.is_by_row else (count, num_rows)):
            return size
    return None


def is_in_order(names: PackedNames, size: int, holders: Holders) -> bool:
    """Return whether groups of ``size`` inputs follow one another."""
    if "groups" not in names:
        return True
    group_K = holders[names["groups"]].get(names["groups"])
    # Published so where inputs have not been sorted.
    return bool((group_K == -1).all()) or torch.equal(group_K, (torch.arange(len(group_K)) // size).to(group_K.dtype))


def open_packed(
    names: PackedNames,
    shape: tuple[int, ...],
    scheme: FourBitScheme,
    holders: Holders,
    device: torch.device | str,
) -> PackedMatrix:
    """Check one weight, and read all of it but the codes.

    Args:
        shape: shape that the model asks for.
        device: device of the result.

    Raises:
        WeightsError: something is missing, misshapen, of another dtype or out of range.
    """
    codes, suffixes = names["codes"], scheme.packing.parts
    is_simple = scheme.packing.is_by_row and not names.keys() & {"zeros", "groups"}
    if len(shape) < 2 or (len(shape) > 2 and not is_simple):
        fault = "in 4 bits are matrices, and several in one tensor if they are symmetric, of compressed-tensors"
        raise WeightsError(f"{codes} stands for a weight of shape {list(shape)}; {fault}")
    required = {"scales": True, "zeros": scheme.has_zeros, "groups": scheme.is_ordered}
    for key in (key for key, is_required in required.items() if is_required and key not in names):
        raise WeightsError(f"{codes.removesuffix(suffixes['codes'])}{suffixes[key]} is missing beside {codes}")
    parts = _Parts(names, shape, scheme, holders)
    scale_NX = parts.scales().to(device)
    zero_NX = parts.zeros(scale_NX.shape[-1], device)
    group_K = parts.groups(scale_NX.shape[-1])
    parts.check_shape()
    return PackedMatrix(scale_NX, zero_NX, group_K.to(device), parts.codes(device))


@dataclass(frozen=True, slots=True)
class _Codes:
    """Reads codes of a matrix ``[N, K]``, or several, ``[..., N, K]``, to a device."""

    name: str
    file: WeightsFile
    shape: tuple[int, ...]
    packing: Packing
    device: torch.device | str

    def read(self, rows: Sequence[slice], inputs: slice) -> Tensor:
        """Return the codes of some rows, whose last range is that of a matrix, and inputs."""
        *_, num_rows, num_inputs = self.shape
        row_range, input_range = range(num_rows)[rows[-1]], range(num_inputs)[inputs]
        packed_range, other_range = (input_range, row_range) if self.packing.packs_inputs else (row_range, input_range)
        is_last = self.packing.is_by_row == self.packing.packs_inputs  # the packed dimension
        index = (_slice(other_range), _numbers_of(packed_range))
        packed = self.file.get(self.name, (*rows[:-1], *(index if is_last else index[::-1])))
        packed = packed.to(self.device).flatten(0, -2)
        codes = _unpack(packed if is_last else packed.t(), self.packing.order)[:, _places_of(packed_range)]
        return codes if self.packing.packs_inputs else codes.t()


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _numbers_of(codes: range) -> slice:
    """Return which int32 hold a range of codes."""
    return slice(codes.start // PER_NUMBER, _numbers(codes.stop))


def _places_of(codes: range) -> slice:
    """Return where a range of codes lies in these numbers."""
    first = codes.start % PER_NUMBER
    return slice(first, first + len(codes))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Reads and checks what a weight consists of."""

    names: PackedNames
    shape: tuple[int, ...]
    scheme: FourBitScheme
    holders: Holders

    def _checked(self, key: str, *shapes: tuple[int, ...], dtype: str | None = None) -> tuple[str, WeightsFile]:
        """Return the name and the file of a tensor that has one of these shapes."""
        name = self.names[key]
        file = self.holders[name]
        found = tuple(file.shape(name))
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            asks = f"a weight of {list(self.shape)} in {self.scheme} asks for {wanted}"
            raise WeightsError(f"{name} has shape {list(found)}; {asks}")
        if dtype is not None and file.dtype(name) != dtype:
            raise WeightsError(f"{name} is stored as {file.dtype(name)}; 4-bit weights are packed into int32 ({dtype})")
        return name, file

    def _read(self, key: str, *shapes: tuple[int, ...]) -> Tensor:
        name, file = self._checked(key, *shapes)
        return file.get(name)

    def _packed(self, key: str, shape: tuple[int, int]) -> Tensor:
        name, file = self._checked(key, shape, dtype=PACKED_DTYPE)
        return file.get(name)

    def codes(self, device: torch.device | str) -> _Codes:
        *outer, num_rows, num_inputs = self.shape
        packing = self.scheme.packing
        shape = (num_rows, _numbers(num_inputs)) if packing.packs_inputs else (_numbers(num_rows), num_inputs)
        whole = (*outer, *(shape if packing.is_by_row else shape[::-1]))
        name, file = self._checked("codes", whole, dtype=PACKED_DTYPE)
        return _Codes(name, file, self.shape, packing, device)

    def scales(self) -> Tensor:
        """Return ``[..., N, X]``."""
        *outer, num_rows, num_inputs = self.shape
        counts = [-(-num_inputs // (size or num_inputs)) for size in self.scheme.group_sizes]
        is_by_row = self.scheme.packing.is_by_row
        shapes = ((*outer, num_rows, count) if is_by_row else (count, num_rows) for count in counts)
        scales = self._read("scales", *shapes)
        check_scale(self.names["scales"], scales)
        return scales if is_by_row else scales.t()

    def zeros(self, num_groups: int, device: torch.device | str) -> Tensor:
        """Return ``[..., N, X]``."""
        *outer, num_rows, _ = self.shape
        if "zeros" not in self.names:
            zero = torch.tensor(SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
            return zero.expand(*outer, num_rows, num_groups)
        if self.scheme.packing.is_by_row:
            packed = self._packed("zeros", (_numbers(num_rows), num_groups)).to(device).t()
        else:
            packed = self._packed("zeros", (num_groups, _numbers(num_rows))).to(device)
        zero_XN = _unpack(packed, self.scheme.packing.order)[:, :num_rows]
        return (zero_XN + self.scheme.zero_offset).bitwise_and_(15).t()

    def groups(self, num_groups: int) -> Tensor:
        """Return the group of each input."""
        num_inputs = self.shape[-1]
        sizes = [size or num_inputs for size in self.scheme.group_sizes]
        size = next(size for size in sizes if -(-num_inputs // size) == num_groups)
        in_order_K = torch.arange(num_inputs) // size
        if "groups" not in self.names:
            return in_order_K
        group_K, name = self._read("groups", (num_inputs,)), self.names["groups"]
        if group_K.is_floating_point():
            raise WeightsError(f"{name} is stored as {group_K.dtype}; groups are whole numbers")
        if self.scheme.packing is PACKED_COMPRESSED and bool((group_K == -1).all()):
            return in_order_K  # written where inputs have not been sorted
        for wrong in group_K[(group_K < 0) | (group_K >= num_groups)].tolist():
            raise WeightsError(f"{name} names group {wrong}; there are {num_groups}")
        return group_K.long()

    def check_shape(self) -> None:
        if "shape" in self.names:
            check_published_shape(self.names["shape"], self.holders, self.shape)


def _numbers(num_codes: int) -> int:
    return -(-num_codes // PER_NUMBER)


def _unpack(packed: Tensor, order: Collection[int] | None = None) -> Tensor:
    """Return the codes of each row of int32, those of a number in this order."""
    # Parts of files may be strided; and little-endian, as safetensors is.
    pairs = packed.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(packed), -1)
    return codes if order is None else codes.unflatten(1, (-1, PER_NUMBER))[..., list(order)].flatten(1)
