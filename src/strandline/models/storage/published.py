"""Weights as files hold them: as numbers of a dtype, or quantised, in one tensor or several.

A quantised weight has the name that it would have if it were not; the tensors that it consists of may have others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from strandline.errors import WeightsError
from strandline.models.layers.parts.targets import Index, Target
from strandline.models.storage.weights_files import WeightsFile

STORED_DTYPES: Final = ("F32", "BF16", "F16")

Holders = Mapping[str, WeightsFile]
"""The file that holds each published tensor."""


class OpenWeight(Protocol):
    """A published weight whose scales and the like have been read and checked, but not its numbers."""

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """Read a part of the weight; dequantise it to a dtype on the device that it was opened for."""


class PublishedWeight(Protocol):
    """A weight in files. Nothing of it has been read."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the published tensors that it consists of; the first holds its numbers."""

    def check(self, target: Target) -> None:
        """Raise WeightsError if its shape or dtype is not the target's."""

    def open(self, target: Target, device: torch.device | str) -> OpenWeight:
        """Read and check all but the numbers.

        Raises:
            WeightsError: something is missing, misshapen, of another dtype or out of range.
        """


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A tensor that is not quantised."""

    name: str
    file: WeightsFile

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.name,)

    def check(self, target: Target) -> None:
        """See ``PublishedWeight``."""
        check_shape(self.file, self.name, target)
        dtype = self.file.dtype(self.name)
        if target.pieces and dtype not in STORED_DTYPES:
            hint = f"; {dtype} with a quantization_config in config.json" if dtype.startswith("F8_E4M3") else ""
            raise WeightsError(
                f"{self.file.path}: {self.name} is stored as {dtype}; supported: {', '.join(STORED_DTYPES)}{hint}"
            )

    def open(self, target: Target, device: torch.device | str) -> "PlainWeight":
        """See ``PublishedWeight``."""
        return self

    def read(self, index: Index, dtype: torch.dtype) -> Tensor:
        """Read a part of the tensor, in its own dtype, on the host: what it is copied to converts it."""
        return self.file.get(self.name, index)


def check_shape(file: WeightsFile, name: str, target: Target) -> None:
    """Raise WeightsError if a tensor does not have the shape of its target."""
    shape = file.shape(name)
    if tuple(shape) != target.shape:
        wanted = list(target.shape)
        raise WeightsError(f"{file.path}: {name} has shape {shape}, the configuration asks for {wanted}")


def check_published_shape(name: str, holders: Holders, shape: tuple[int, ...]) -> None:
    """Raise WeightsError if a tensor that repeats the shape of a quantised weight says another one."""
    found = holders[name].get(name).tolist()
    if found != list(shape):
        raise WeightsError(f"{name} says {found}, the model asks for {list(shape)}")
