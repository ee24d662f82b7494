"""The size of a launch, for every kernel that multiplies tiles."""

from typing import NamedTuple


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


Pair = tuple[Launch, Launch]
"""The launches of the two products of experts."""
