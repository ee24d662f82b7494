"""Receives published tensors from a trainer, into the host's memory."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strandline.device.weights.shared_handles import open_shared, read_handles
from strandline.device.weights.weight_groups import WeightGroup, join_group
from strandline.errors import ConfigError
from strandline.models.storage.received_tensors import DTYPE_NAMES
from strandline.records.weight_transfer import SentTensors, TransferGroup
from strandline.weight_transfer_config import FLAG, WeightTransferConfig

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


class Announced(NamedTuple):
    """A tensor that is to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightReceiver:
    """What one rank receives.

    Args:
        config: None: trainers send nothing to this engine.
        rank: rank of this receiver among all ranks of all engines of the server.
        device: device that the trainer sends to.
    """

    def __init__(self, config: WeightTransferConfig | None, rank: int, device: torch.device) -> None:
        self._config, self._rank, self._device = config, rank, device
        self._group: WeightGroup | None = None
        self._described = TransferGroup()
        self._last: SentTensors | None = None
        self._tensors: dict[str, Tensor] | None = None
        """What has been received; None: no update has begun, or it has failed."""
        self._opened = dict[str, Tensor]()
        """Shared tensors, by their handles."""

    def join(self, group: TransferGroup) -> None:
        """Join a trainer's group; one that was joined before is left.

        Raises:
            ConfigError: trainers send nothing to this engine, or this one does not come.
        """
        config = self._require_config()
        self.leave()
        rank = group.rank_offset + self._rank
        if config.backend == "nccl":
            if not group.master_address or not 0 < group.rank_offset <= rank < group.world_size:
                raise ConfigError(
                    f"init_info: the trainer's rank is 0, so rank_offset must be at least 1, and rank {rank} of this "
                    f"engine below world_size, which is {group.world_size}; /get_world_size says how many there are"
                )
            address = group.master_address, group.master_port
            self._group = join_group(address, rank, group.world_size, self._device, config.timeout_s)
        self._described = group

    def leave(self) -> None:
        """Leave the group, if one was joined, and forget what has been received."""
        if self._group is not None:
            self._group.close()
        self._group, self._last, self._tensors = None, None, None

    def begin(self) -> None:
        """Begin an update; what an unfinished one has received is forgotten."""
        self._require_config()
        self._tensors = {}
        self._opened.clear()

    def receive(self, sent: Sequence[SentTensors]) -> None:
        """Receive tensors; if that fails, the update has failed.

        Args:
            sent: one for all ranks of the server, or one for each.

        Raises:
            ConfigError: no update has begun, tensors are not as announced, or the trainer is lost.
        """
        received, self._tensors = self._tensors, None
        if received is None:
            raise ConfigError("no update of weights has begun: POST /start_weight_update first")
        if len(sent) > 1 and self._rank >= len(sent):
            raise ConfigError(f"update_info has {len(sent)} entries, and none for rank {self._rank}")
        own = sent[self._rank if len(sent) > 1 else 0]
        if not own.names and self._last is not None:
            own = self._last
        announced = _announced(own)
        for each in announced:
            if each.name in received:
                raise ConfigError(f"{each.name} was sent twice")
        shares_memory = self._require_config().backend == "ipc"
        for each, tensor in self._shared(own, announced) if shares_memory else self._broadcast(own, announced):
            received[each.name] = tensor
        self._last, self._tensors = own, received

    def take(self) -> Mapping[str, Tensor]:
        """Return what has been received, and end the update.

        Raises:
            ConfigError: no update has begun, or it has failed.
        """
        received, self._tensors = self._tensors, None
        self._opened.clear()
        if received is None:
            raise ConfigError(
                "no update of weights is under way, or it has failed: POST /start_weight_update begins one"
            )
        return received

    def _require_config(self) -> WeightTransferConfig:
        if self._config is None:
            raise ConfigError(
                f"""trainers send weights to servers with {FLAG} '{{"backend": "nccl"}}' or "ipc" alone"""
            )
        return self._config

    def _broadcast(self, sent: SentTensors, announced: Sequence[Announced]) -> Iterator[tuple[Announced, Tensor]]:
        """Yield the tensors that a trainer sends, as it packs them."""
        if self._group is None:
            raise ConfigError("no group of a trainer was joined: POST /init_weight_transfer_engine first")
        is_packed = self._described.packed if sent.packed is None else sent.packed
        limit = self._described.buffer_bytes if is_packed else -1
        pack, num_bytes = list[Announced](), 0
        for each in announced:
            pack.append(each)
            num_bytes += each.num_bytes
            if num_bytes > limit:
                yield from self._receive_pack(self._group, pack)
                pack, num_bytes = [], 0
        if pack:
            yield from self._receive_pack(self._group, pack)

    def _receive_pack(self, group: WeightGroup, pack: Sequence[Announced]) -> Iterator[tuple[Announced, Tensor]]:
        buffer = torch.empty(sum(each.num_bytes for each in pack), dtype=torch.uint8, device=self._device)
        group.receive(buffer)
        yield from _unpacked(buffer.cpu(), pack)

    def _shared(self, sent: SentTensors, announced: Sequence[Announced]) -> Iterator[tuple[Announced, Tensor]]:
        """Yield copies of the tensors that a trainer shares."""
        if sent.handles is None:
            raise ConfigError("update_info has no ipc_handles_pickled")
        handles = read_handles(sent.handles)
        if not isinstance(handles, list):
            buffer = self._open(handles).view(torch.uint8)
            sizes = list(sent.tensor_sizes) or [each.num_bytes for each in announced]
            if sizes != [each.num_bytes for each in announced] or sum(sizes) > buffer.numel():
                raise ConfigError(f"tensor_sizes are not those of the announced tensors in {buffer.numel()} bytes")
            yield from _unpacked(buffer[: sum(sizes)].cpu(), announced)
            return
        if len(handles) != len(announced):
            raise ConfigError(f"update_info has {len(handles)} handles for {len(announced)} names")
        for each, handle in zip(announced, handles, strict=True):
            tensor = self._open(handle)
            if tensor.nbytes != each.num_bytes:
                raise ConfigError(
                    f"{each.name} is announced with {each.num_bytes} bytes, and shared with {tensor.nbytes}"
                )
            yield from _unpacked(tensor.contiguous().view(-1).view(torch.uint8).cpu(), [each])

    def _open(self, handle: Any) -> Tensor:
        """Return a tensor that a trainer shares; it stays open during the update.

        A trainer exports a buffer once and counts how often it is closed, but fills it again and again.
        """
        key = repr(handle)
        if key not in self._opened:
            self._opened[key] = open_shared(handle, self._device)
        return self._opened[key]


def _announced(sent: SentTensors) -> list[Announced]:
    """Return what is to come; raises a ConfigError if it is not well described."""
    if not len(sent.names) == len(sent.dtype_names) == len(sent.shapes):
        counts = f"{len(sent.names)}, {len(sent.dtype_names)} and {len(sent.shapes)}"
        raise ConfigError(f"names, dtype_names and shapes must have the same length, not {counts}")
    for name, dtype in zip(sent.names, sent.dtype_names, strict=True):
        if dtype not in DTYPES:
            raise ConfigError(f"{name}: dtype_names must be among {', '.join(DTYPES)}; got {dtype!r:.100}")
    if len(set(sent.names)) < len(sent.names):
        raise ConfigError("a name was announced twice")
    rows = zip(sent.names, sent.dtype_names, sent.shapes, strict=True)
    return [Announced(name, DTYPES[dtype], shape) for name, dtype, shape in rows]


def _unpacked(buffer: Tensor, pack: Sequence[Announced]) -> Iterator[tuple[Announced, Tensor]]:
    """Yield tensors of a buffer of bytes, where they are one after the other."""
    for each, data in zip(pack, buffer.split([each.num_bytes for each in pack]), strict=True):
        # Sizes of earlier ones may leave a tensor where its dtype cannot begin.
        aligned = data if data.storage_offset() % each.dtype.itemsize == 0 else data.clone()
        yield each, aligned.view(each.dtype).view(each.shape)
