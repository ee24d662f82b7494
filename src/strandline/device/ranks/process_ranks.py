"""Ranks in separate processes, which communicate through ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

On GPUs, sums go through symmetric memory where it is available (``symmetric_memory.py``). The order in which a backend
adds depends on the size of the tensor, so deterministic engines leave it no sum of more than two numbers.
Ranks rendezvous at a file and connect over the loopback interface only, since all are on one machine.
"""

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from strandline.device.ranks.rendezvous import Rendezvous
from strandline.device.ranks.symmetric_memory import TorchSymmetricMemory, connect_sums
from strandline.kernels.expert_choices import Summand, added_up, like, without_factors
from strandline.kernels.ranks import FewRows, ManyRows, add_in_order

TIMEOUT: Final = timedelta(minutes=10)
"""How long a rank waits for the others: some take longer to load their weights."""

MAX_GATHERED_BYTES: Final = 16 << 20
"""What is gathered from each rank at a time, to be added in order: a limit to scratch memory."""

INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that select the backends' network interface."""

WITHOUT_MULTICAST: Final = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables by which NCCL and torch's symmetric memory leave NVLink multicast off: where GPUs are shared
out, it may be there and not work."""


class ProcessRanks:
    """The ranks of an engine, from this process's rank. Nothing is summed or gathered before ``connect``.

    Args:
        device: this rank's own; on GPUs the only one that the process computes on.
        is_deterministic: whether a row's sum must depend on that row alone, to the last bit.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device, *, is_deterministic: bool = False) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._device, self._rendezvous = device, rendezvous
        # Two numbers have one sum.
        self._adds_in_order = is_deterministic and self.size > 2
        for name, value in (dict.fromkeys(INTERFACES, _loopback()) | WITHOUT_MULTICAST).items():
            os.environ.setdefault(name, value)
        self.enter_thread()
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        """Sent by ``least``, which allocates nothing: there may be no memory left."""
        self.few_rows: FewRows | None = None
        self.many_rows: ManyRows | None = None

    def connect(self) -> None:
        """Wait until all ranks have connected."""
        rank, size, meeting_file = self._rendezvous
        device = self._device
        backend, meeting = "nccl" if device.type == "cuda" else "gloo", f"file://{meeting_file}"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
        self.least(0)  # connects; NCCL waits for the first call to do it
        if device.type == "cuda" and self.size > 1:
            self.few_rows, self.many_rows = connect_sums(self, TorchSymmetricMemory(device, self.size))

    def enter_thread(self) -> None:
        """Prepare a thread that waits for the device: else it would take memory of the first one."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def sum(self, x: Summand) -> Tensor:
        """Return the sum of all ranks' tensors or choices; a tensor may be overwritten.

        Sums of one process are enqueued on one stream, or on streams that wait for each other.
        """
        x = without_factors(x)
        if self.few_rows is not None and self.few_rows.can_sum(like(x)):
            return self.few_rows.sum(added_up(x))
        if self.many_rows is not None:
            x = x if self.many_rows.can_sum(x) else added_up(x)
            if self.many_rows.can_sum(x):
                return self.many_rows.sum(x)
        x = added_up(x).contiguous()
        if not x.numel():
            return x
        if self._adds_in_order and x.is_floating_point():
            for part in x.view(-1).split(MAX_GATHERED_BYTES // x.itemsize):
                part.copy_(add_in_order(self._of_all(part).unbind()))
        else:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' matrices side by side; enqueued as sums are."""
        if self.few_rows is not None and self.few_rows.can_gather(x):
            return self.few_rows.gather(x)
        return self._of_all(x).transpose(0, 1).reshape(len(x), -1)

    def _of_all(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors, one after the other."""
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            dist.all_gather(list(parts.unbind()), x.contiguous())
        return parts

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers; waits for the device."""
        self._number.fill_(number)
        dist.all_reduce(self._number, dist.ReduceOp.MIN)
        return int(self._number)

    def close(self) -> None:
        """Disconnect. No collective operations may follow.

        The last rank that does so removes the rendezvous: another may be about to open it, and would wait for it.
        """
        self.few_rows = self.many_rows = None
        dist.destroy_process_group()
        with suppress(OSError):
            Path(self._rendezvous.meeting_file).parent.rmdir()


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
