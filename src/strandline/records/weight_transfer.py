"""What a trainer says of the weights that it is about to send."""

import msgspec


class TransferGroup(msgspec.Struct, frozen=True):
    """The processes that take part in a transfer: the trainer, whose rank is 0, and all ranks of all engines."""

    master_address: str = ""
    """Where the trainer listens; empty: it shares memory, and there is no group."""
    master_port: int = 0
    rank_offset: int = 1
    """The rank of the first rank of the first engine."""
    world_size: int = 0
    packed: bool = False
    """Whether tensors are sent several at a time, one after the other as bytes."""
    buffer_bytes: int = 2**30
    """Tensors are packed until they are larger than this."""


class SentTensors(msgspec.Struct, frozen=True):
    """Tensors that are sent next, in this order."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: bool | None = None
    """See ``TransferGroup``; None: as it says."""
    handles: str | None = None
    """Handles of shared memory, pickled as ``torch.multiprocessing`` does it, in base64."""
    tensor_sizes: tuple[int, ...] = ()
    """Sizes of the tensors in one shared buffer, in bytes."""
