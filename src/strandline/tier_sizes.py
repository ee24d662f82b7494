"""Sizes of the tiers below the device, in blocks of a model."""

from typing import Final

from strandline.config import parse_bytes
from strandline.errors import ConfigError
from strandline.specs import ModelSpec

BUFFER_SLABS: Final = 32
BUFFER_SNAPSHOTS: Final = 8
"""The size of host memory before files, where none is configured: the larger of the two."""


def buffer_blocks(spec: ModelSpec, snapshot_dtype: str) -> int:
    """Return the blocks of host memory before files, where none is configured."""
    return max(BUFFER_SLABS * spec.blocks_per_slab, BUFFER_SNAPSHOTS * spec.stored_snapshots(snapshot_dtype).max_blocks)


def blocks_below(size: str | int, name: str, spec: ModelSpec, snapshot_dtype: str) -> int:
    """Return the size of a tier below the device in blocks.

    Args:
        name: the flag that it is given to.

    Raises:
        ConfigError: it is no size, or has no room for a snapshot with the block that it lies inside.
    """
    num_bytes = parse_bytes(size, name)
    least_bytes = least_bytes_below(spec, snapshot_dtype)
    if num_bytes < least_bytes:
        kept = "a snapshot" if spec.needs_snapshots else "a block"
        raise ConfigError(
            f"{name} of {num_bytes:,} bytes has no room for {kept} of this model; give at least {least_bytes:,} bytes"
        )
    return num_bytes // spec.block_bytes


def least_bytes_below(spec: ModelSpec, snapshot_dtype: str) -> int:
    """Return the least size of a tier below the device in bytes: the largest snapshot and the block it is inside."""
    return (spec.stored_snapshots(snapshot_dtype).max_blocks + 1) * spec.block_bytes
