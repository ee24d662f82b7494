"""Groups of a trainer and the ranks that receive its weights.

They meet at a store of the trainer's, as vLLM's do: it publishes NCCL's unique id there, and the first operation of the
group is a sum of one number. On CPUs the group is gloo's, over the same store.
"""

import ctypes
import io
import pickle
import socket
import time
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from strandline.errors import ConfigError

UNIQUE_ID_KEY: Final = "broadcast_from/0/0"
"""Where the trainer stores NCCL's unique id."""
GLOO_PREFIX: Final = "gloo"
"""What the keys begin with by which gloo's ranks find each other."""
POLL_S: Final = 0.001
NCCL_TYPES: Final = {torch.float32: 7, torch.uint8: 1}
"""NCCL's numbers of dtypes."""
NCCL_SUM: Final = 0
NCCL_SUCCESS: Final = 0


class WeightGroup(Protocol):
    """A trainer, and ranks that receive."""

    def receive(self, out: Tensor) -> None:
        """Fill a tensor of bytes with the next one that the trainer sends.

        Raises:
            ConfigError: it does not come.
        """

    def close(self) -> None:
        """Leave the group."""


def join_group(address: tuple[str, int], rank: int, size: int, device: torch.device, timeout_s: float) -> WeightGroup:
    """Join a trainer's group; waits until all have joined.

    Raises:
        ConfigError: the trainer, or another rank, does not come.
    """
    host, port = address
    timeout = timedelta(seconds=timeout_s)
    try:
        store = c10d.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        if device.type != "cuda":
            return GlooGroup(store, rank, size, timeout, local_address(host, port))
        return NcclGroup(read_unique_id(store.get(UNIQUE_ID_KEY)), rank, size, device, timeout_s)
    except (RuntimeError, OSError) as error:
        reason = _first_line(error)
        raise ConfigError(f"rank {rank} of {size} did not meet the trainer at {host}:{port}: {reason}") from error


def local_address(host: str, port: int) -> str:
    """Return the address by which this machine reaches another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found


class GlooGroup:
    """A group over TCP.

    Args:
        address: address of this machine, which the others reach.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, address: str) -> None:
        gloo: Any = c10d.ProcessGroupGloo  # its stubs lack options
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(c10d.PrefixStore(GLOO_PREFIX, store), rank, size, options)
        self._group.allreduce([torch.zeros(1)]).wait()

    def receive(self, out: Tensor) -> None:
        """See ``WeightGroup``."""
        try:
            self._group.broadcast([out], _from_trainer()).wait()
        except RuntimeError as error:
            raise ConfigError(f"the trainer did not send what it has announced: {_first_line(error)}") from error

    def close(self) -> None:
        """See ``WeightGroup``."""
        del self._group


def _from_trainer() -> c10d.BroadcastOptions:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    return options


class UniqueId(ctypes.Structure):
    """NCCL's name of a group."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def read_unique_id(data: bytes) -> UniqueId:
    """Return the unique id that a trainer has pickled, as vLLM does.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = _UniqueIdUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"the trainer's store has no unique id of NCCL: {error}") from error
    if not isinstance(found, UniqueId):
        raise ConfigError("the trainer's store has no unique id of NCCL")
    return found


class _UniqueIdUnpickler(pickle.Unpickler):
    """Takes a structure of ctypes, whatever module the trainer has it from, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return super().find_class(module, name)
        if name == "ncclUniqueId":
            return UniqueId
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class NcclGroup:
    """A group of GPUs.

    torch's own groups of NCCL have another handshake than the one of trainers, so the library is called directly.
    """

    def __init__(self, unique_id: UniqueId, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._nccl = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), size, unique_id, rank)
            self._run("ncclAllReduce", torch.zeros(1, device=device), NCCL_SUM)

    def receive(self, out: Tensor) -> None:
        """See ``WeightGroup``."""
        with torch.cuda.device(self._device):
            self._run("ncclBroadcast", out, 0)

    def close(self) -> None:
        """See ``WeightGroup``."""
        if self._comm is not None:
            self._nccl.ncclCommDestroy(self._comm)
            self._comm = None

    def _run(self, function: str, tensor: Tensor, argument: int) -> None:
        """Run an operation in place, and wait for it; give the group up if it takes too long."""
        if self._comm is None:
            raise ConfigError("the trainer's group was given up: POST /init_weight_transfer_engine joins another")
        address = ctypes.c_void_p(tensor.data_ptr())
        count, dtype = ctypes.c_size_t(tensor.numel()), NCCL_TYPES[tensor.dtype]
        stream = torch.cuda.current_stream()
        self._call(function, address, address, count, dtype, argument, self._comm, ctypes.c_void_p(stream.cuda_stream))
        done = torch.cuda.Event()
        done.record(stream)
        deadline, failure = time.monotonic() + self._timeout_s, ctypes.c_int(NCCL_SUCCESS)
        while not done.query():
            self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(failure))
            if failure.value != NCCL_SUCCESS or time.monotonic() > deadline:
                self._nccl.ncclCommAbort(self._comm)  # else the stream would wait for ever
                self._comm = None
                raise ConfigError(f"the trainer did not send what it has announced within {self._timeout_s:g} s")
            time.sleep(POLL_S)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nccl, function)(*arguments)
        if code != NCCL_SUCCESS:
            raise ConfigError(f"{function} failed: {self._nccl.ncclGetErrorString(code).decode()}")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
