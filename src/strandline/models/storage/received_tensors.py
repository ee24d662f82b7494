"""Published tensors in memory, such as a trainer has sent, in the form of an open file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from strandline.models.storage.weights_files import WeightsFile

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""Dtypes that may be sent, with safetensors' names for them."""


def received_file(tensors: Mapping[str, Tensor]) -> WeightsFile:
    """Return tensors as the only file of a model."""
    return WeightsFile(Path("what was sent"), _Received(tensors))


@dataclass(frozen=True, slots=True, eq=False)
class _Received:
    """What safetensors' files are read by."""

    tensors: Mapping[str, Tensor]

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self.tensors[name])


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    """A tensor that is read in parts."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self.tensor.dtype]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.tensor[index]
