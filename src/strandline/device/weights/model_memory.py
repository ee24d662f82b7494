"""The memory of a model's tensors: given back to the device or the system, taken again, and paired with another's.

Tensors stay the same objects, so all that refers to them stays valid. On a CPU they also stay at their addresses; on
a GPU, memory that is taken again may be elsewhere, so captured graphs are of no use any more.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strandline.device.hardware.out_of_memory import allocating
from strandline.errors import ConfigError, OutOfMemoryError
from strandline.kernels.binding import Kernels
from strandline.kernels.gemm.weights import HalfWeight, Weight


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return one tensor for each piece of memory that a model's weights take."""
    found = dict[int, Tensor]()
    weights = _weights_in([vars(module) for module in model.modules()])
    for tensor in (*model.parameters(), *_tensors_in([*weights])):
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(found.values())


def can_copy(model: nn.Module) -> bool:
    """Return whether all weights are in layouts whose memory can be filled again; those of some libraries are not."""
    modules = list(model.modules())
    has_opaque = any(isinstance(weight, HalfWeight) for weight in _weights_in([vars(module) for module in modules]))
    tensors = (tensor for module in modules for tensor in _tensors_in(vars(module)))
    return not has_opaque and all(tensor.layout is torch.strided for tensor in tensors)


def pair_tensors(target: nn.Module, source: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return a model's tensors, each with that of another model that was built alike.

    Raises:
        ConfigError: one has another shape or format.
    """
    pairs = list[tuple[Tensor, Tensor]]()
    for (name, ours), theirs in zip(target.named_modules(), source.modules(), strict=True):
        old, new = (list(map(_unrepeated, _tensors_in(vars(module)))) for module in (ours, theirs))
        if [(each.shape, each.dtype) for each in old] != [(each.shape, each.dtype) for each in new]:
            raise ConfigError(f"the weights of {name} have another format than those that the engine has loaded")
        pairs += zip(old, new, strict=True)
    return pairs


class LentMemory(Protocol):
    """Memory that is given back for a while."""

    def give_back(self, *, keeps: bool) -> None:
        """Give it back; ``keeps``: keep the contents in the host's memory."""

    def take_again(self) -> bool:
        """Take it again, until that is confirmed or undone; return whether its contents are there.

        Raises:
            ConfigError: the contents cannot be read again.
            OutOfMemoryError: there is too little memory.
        """

    def confirm(self) -> None:
        """Give up what was kept."""

    def undo(self) -> None:
        """Give back what was taken again; all is as it was when it was given back."""


class TensorMemory:
    """The memory of tensors, which can be given back.

    Args:
        tensors: each with memory of its own, all on one device.
        what: what they are, in messages.
    """

    def __init__(self, tensors: Iterable[Tensor], what: str = "tensors") -> None:
        self._tensors, self._what = list(tensors), what
        self._kept: list[tuple[int, Tensor | None]] = []
        """For each tensor on a GPU, the size of its memory in bytes, and a copy of it in the host's memory."""

    def give_back(self, *, keeps: bool) -> None:
        """Give memory back.

        Args:
            keeps: keep the contents in the host's memory, where a CPU's tensors are already.
        """
        if not self._is_freed_whole:
            if not keeps:
                self._discard()
            return
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        copies = [_copied(tensor) if keeps else None for tensor in self._tensors]
        self._kept = list(zip(sizes, copies, strict=True))
        self._free()

    def forget(self) -> None:
        """Give up the contents that were kept when the memory was given back."""
        self._kept = [(num_bytes, None) for num_bytes, _ in self._kept]
        if not self._is_freed_whole:
            self._discard()

    def take_again(self) -> bool:
        """Take all of the memory again: with its contents if they were kept, else with zeros. Then confirm or undo it.

        Raises:
            OutOfMemoryError: the device has too little; none of it is taken.
        """
        if not self._kept:
            return True
        try:
            with allocating(self._what, sum(num_bytes for num_bytes, _ in self._kept), self._tensors[0].device):
                for tensor, (num_bytes, copy) in zip(self._tensors, self._kept, strict=True):
                    allocate(tensor, num_bytes)
                    if copy is None:
                        _bytes_of(tensor).zero_()
                    else:
                        _bytes_of(tensor).copy_(copy)
        except OutOfMemoryError:
            self._free()
            raise
        return True

    def confirm(self) -> None:
        """Give up what was kept of memory that was taken again."""
        self._kept = []

    def undo(self) -> None:
        """Give memory back that was taken again, with the contents that it was given back with."""
        if self._kept:
            self._free()

    @property
    def _is_freed_whole(self) -> bool:
        """Whether the memory is freed, and not just its pages: there are tensors, and they are not on a CPU."""
        return any(tensor.device.type != "cpu" for tensor in self._tensors)

    def _free(self) -> None:
        torch.cuda.synchronize()
        for tensor in self._tensors:
            release(tensor)
        torch.cuda.empty_cache()

    def _discard(self) -> None:
        for tensor in self._tensors:
            _discard_pages(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())


def allocate(tensor: Tensor, num_bytes: int) -> None:
    """Give a tensor memory, after ``release``; its contents are undefined."""
    tensor.untyped_storage().resize_(num_bytes)


def release(tensor: Tensor) -> None:
    """Give a tensor's memory to torch; it is used by no other."""
    tensor.untyped_storage().resize_(0)


def _weights_in(value: Any) -> Iterator[Weight]:
    """Yield the weights in a value and in the collections in it."""
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _weights_in(each)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: those of records and collections in it, but not of other modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type | Kernels):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _unrepeated(tensor: Tensor) -> Tensor:
    """Return a tensor without the dimensions in which one element stands for all, as a scale of whole rows does."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of all of a tensor's memory in the host's."""
    return torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8).copy_(_bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor's memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _discard_pages(address: int, num_bytes: int) -> None:
    """Return the whole pages in a range of memory to the system; they read as zeros afterwards."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + num_bytes) // page * page
    if first < end:
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
        )
