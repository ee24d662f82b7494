"""The size of a launch, for every kernel that multiplies tiles, and the choice of one that a GPU has room for.

Launches are measured on Hopper GPUs. On one with less shared memory, loops take fewer stages (``stages_triton.py``);
where a tile does not fit even in one, the kernel has smaller ones.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from strandline.kernels.gpu import Gpu

LaunchT = TypeVar("LaunchT")


class Launch(NamedTuple):
    """How a GEMM is tiled."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Outputs; with a gate, as many of the gate and as many of the up projection."""
    block_k: int
    """Inputs at a time."""
    warps: int
    stages: int
    splits: int = 1
    """Programs that share a tile's work: of experts the rows, else the inputs."""
    blocks: int = 1
    """Tiles of outputs that a program computes, one after the other. It loads the next one ahead."""
    is_halved: bool = False
    """Whether an expert's last rows take a tile of half the height where they fit."""

    def options(self) -> dict[str, int]:
        """Return the launch arguments."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "num_warps": self.warps, "num_stages": self.stages}


def first_that_fits(launches: Sequence[LaunchT], shared_bytes: Callable[[LaunchT], int], gpu: Gpu) -> LaunchT:
    """Return the first launch that a GPU has room for; the last, if it has room for none.

    Args:
        shared_bytes: returns what a launch takes with one stage.
    """
    return next((launch for launch in launches if shared_bytes(launch) <= gpu.shared_bytes), launches[-1])


Pair = tuple[Launch, Launch]
"""The launches of the two products of experts."""
