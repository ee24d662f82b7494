"""The stores below the device: host memory and, below that, a disk."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from strandline.clock import SYSTEM_CLOCK
from strandline.config import DISK_CACHE_SIZE, EngineConfig, blocks_below, buffer_blocks, least_bytes_below
from strandline.device.hardware.dtypes import machine_bytes
from strandline.device.stores.arena_copies import ArenaCopies
from strandline.device.stores.disk_store import DISK_STORE, DiskStore
from strandline.device.stores.host_store import HOST_STORE, HostStore, PinnedStore, choose_staging_bytes
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.errors import ConfigError
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.records.kept import Kept
from strandline.specs import ModelSpec
from strandline.transfer.disk_directory import DiskDirectory
from strandline.transfer.layout import layout_of
from strandline.version import VERSION


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Facts about a disk cache that the core needs."""

    directory: str
    num_blocks: int
    """Its size."""
    key: bytes
    """Secret that salts are hashed with."""
    kept: list[Kept]
    """Entries from earlier processes, in a list of one, which the core empties; on a rank, the rank's part."""
    scan_s: float
    """Time to read them."""


@dataclass(frozen=True, slots=True)
class LowerFacts:
    """Facts about host memory and the disk cache that the core needs."""

    num_host_blocks: int = 0
    """Size of the host memory, in blocks; 0: there is none."""
    is_buffer: bool = False
    """Whether none is configured: it only passes data on to the disk."""
    disk: DiskFacts | None = None


def lower_device_bytes(config: EngineConfig, spec: ModelSpec, device: torch.device) -> int:
    """Return how much device memory the stores need."""
    has_stores = config.host_memory is not None or config.disk_cache is not None
    return choose_staging_bytes(spec, config.snapshot_dtype) if has_stores and device.type == "cuda" else 0


def attach_stores(
    config: EngineConfig,
    arena: ArenaTensors,
    transfers: Transfers,
    weights: str,
    ranks: Ranks = ONE_RANK,
    *,
    progress: bool,
) -> tuple[LowerFacts, DiskStore | None]:
    """Create this rank's configured stores; also return the disk's.

    Args:
        weights: a digest of the model's weights.

    Raises:
        ConfigError: the directory of the disk cache cannot be used, a size has no room for a snapshot, or there is not
            so much host memory for all ranks.
    """
    if config.host_memory is None and config.disk_cache is None:
        return LowerFacts(), None
    spec, num_blocks, num_disk_blocks = arena.spec, buffer_blocks(arena.spec, config.snapshot_dtype), 0
    if config.host_memory is not None:
        num_blocks = blocks_below(config.host_memory, "--host-memory", spec, config.snapshot_dtype)
    _require_host_memory(config, spec, num_blocks * spec.block_bytes, ranks.size)
    if config.disk_cache is not None:
        size = DISK_CACHE_SIZE if config.disk_cache_size is None else config.disk_cache_size
        num_disk_blocks = blocks_below(size, "--disk-cache-size", spec, config.snapshot_dtype)
    slots = slot_encoding(spec, config.snapshot_dtype)
    new_store = PinnedStore if arena.bytes.device.type == "cuda" else HostStore
    host = new_store(arena, num_blocks, transfers.completions, slots)
    transfers.attach(HOST_STORE, host)
    if config.disk_cache is None:
        return LowerFacts(num_blocks), None
    start_s = SYSTEM_CLOCK()
    layout = _layout(config, spec, weights, arena.bytes.device, ranks)
    sizes = spec.stored_snapshots(config.snapshot_dtype).sizes_bytes
    directory = DiskDirectory(Path(config.disk_cache), layout, spec.raw_block_bytes, sizes, ranks.rank)
    if ranks.rank == 0:
        directory.remove_ranks_from(ranks.size)
    with tqdm(desc="disk cache", disable=None if progress else True, unit="file", leave=False, delay=1) as bar:
        found = directory.scan(bar.update)
    store = DiskStore(directory, found.addresses, host, ArenaCopies(arena, slots), transfers.completions)
    transfers.attach(DISK_STORE, store)
    disk = DiskFacts(
        str(directory.path),
        num_disk_blocks,
        directory.key,
        [found.kept],
        SYSTEM_CLOCK() - start_s,
    )
    return LowerFacts(num_blocks, config.host_memory is None, disk), store


def _require_host_memory(config: EngineConfig, spec: ModelSpec, num_bytes: int, num_ranks: int) -> None:
    """Check that the machine has the host memory of all ranks and engines, or that of their buffers before a disk.

    Raises:
        ConfigError: it does not.
    """
    have, num_sharing = machine_bytes(), num_ranks * config.data_parallel_size
    if num_bytes * num_sharing <= have:
        return
    each = f" for each of {num_sharing} {'ranks' if num_ranks > 1 else 'engines'}" if num_sharing > 1 else ""
    found = f"is more than the {have:,} bytes of memory that there are"
    if config.host_memory is not None:
        raise ConfigError(f"--host-memory of {num_bytes:,} bytes{each} {found}; lower it")
    least_bytes = least_bytes_below(spec, config.snapshot_dtype)
    raise ConfigError(
        f"--disk-cache needs a buffer of {num_bytes:,} bytes of host memory{each}, which {found}; give --host-memory, "
        f"of at least {least_bytes:,} bytes, or leave out --disk-cache"
    )


def _layout(config: EngineConfig, spec: ModelSpec, weights: str, device: torch.device, ranks: Ranks) -> dict[str, str]:
    """Return the facts that must be equal for files to be valid in memory."""
    layout = layout_of(spec, weights=weights, is_deterministic=config.deterministic)
    layout |= {"states at rest": config.snapshot_dtype, "weights in": "dtype" if config.dequantize else "as published"}
    if ranks.size > 1:
        layout |= {"tensor-parallel size": str(ranks.size), "rank": str(ranks.rank)}
    if config.deterministic:
        # Bits are those of one machine, one installation and one number of threads.
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else os.uname().nodename
        layout["computed by"] = (
            f"Strandline {VERSION}, torch {torch.__version__}, {torch.get_num_threads()} threads, {name}"
        )
    return layout
