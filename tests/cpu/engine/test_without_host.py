"""What a CUDA graph cannot capture is noticed on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strandline.kernels.binding import reference_kernels
from strandline.kernels.operation import operation, triton
from tests.cpu.engine.without_host import NeedsHost, on_the_host, without_host

x_N = torch.arange(5)
mask_N = x_N > 2


@operation(triton("step_triton"))
def first_of(x_N: Tensor) -> int:
    return _first(x_N)


@operation()
def last_of(x_N: Tensor) -> int:
    return int(x_N[-1])


def _first(x_N: Tensor) -> int:
    return int(x_N[0])


def _assign(index: int | slice | Tensor, value: int) -> None:
    x_N.clone()[index] = value


KERNELS = reference_kernels([first_of, last_of])


NEED_HOST: dict[str, Callable[[], object]] = {
    "assigned number": lambda: _assign(-1, 7),
    "number assigned by mask": lambda: _assign(mask_N, 7),
    "tensor of a list": lambda: torch.tensor([1, 2]),
    "new tensor of a list": lambda: x_N.new_tensor([1]),
    "list of indices": lambda: x_N[[0, 1]],
    "item": x_N[0].item,
    "list": x_N.tolist,
    "copy to the host": x_N.cpu,
    "copy to a device": lambda: x_N.to("cpu"),
    "array": x_N.numpy,
    "condition": lambda: bool(mask_N.any()),
    "mask": lambda: x_N[mask_N],
    "selected by mask": lambda: x_N.masked_select(mask_N),
    "nonzero": x_N.nonzero,
    "where without values": lambda: torch.where(mask_N),
    "repeats": lambda: x_N.repeat_interleave(x_N),
    "unique": x_N.unique,
    "comparison": lambda: x_N.equal(mask_N),
    "operation without a backend": lambda: KERNELS[last_of](x_N),
}


@pytest.mark.parametrize("run", NEED_HOST.values(), ids=NEED_HOST)
def test_what_needs_the_host_is_noticed(run: Callable[[], object]) -> None:
    with torch.inference_mode(), without_host(KERNELS), pytest.raises(NeedsHost):
        run()


def test_what_needs_no_host_runs() -> None:
    with torch.inference_mode(), without_host(KERNELS):
        x_N.clone()[-1:].fill_(7)
        x_N.clone()[x_N] = x_N
        torch.where(mask_N, x_N, 3).clamp_min(0).to(torch.float32)
        torch.full((3,), 7)
        assert KERNELS[first_of](x_N) == 0
        with on_the_host():
            assert x_N.tolist() == [0, 1, 2, 3, 4]
