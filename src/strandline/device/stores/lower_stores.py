"""The stores below the device: host memory and, below that, a disk or an object store."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from strandline.clock import SYSTEM_CLOCK
from strandline.config import DISK_CACHE_SIZE, OBJECT_STORE_SIZE, EngineConfig
from strandline.device.hardware.dtypes import machine_bytes
from strandline.device.stores.arena_copies import ArenaCopies
from strandline.device.stores.file_store import DISK_STORE, OBJECT_STORE, FileStore
from strandline.device.stores.host_store import HOST_STORE, HostStore, PinnedStore, choose_staging_bytes
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.errors import ConfigError, cause_of
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.records.kept import Kept
from strandline.specs import ModelSpec
from strandline.tier_sizes import blocks_below, buffer_blocks, least_bytes_below
from strandline.transfer.disk_directory import DiskDirectory
from strandline.transfer.layout import layout_of
from strandline.transfer.object_files import ObjectFiles
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
class ObjectFacts:
    """Facts about an object store that the core needs."""

    url: str
    num_blocks: int
    """As much of it as the engine uses."""
    layout: dict[str, str]
    """That of the first rank's files."""


@dataclass(frozen=True, slots=True)
class LowerFacts:
    """Facts about memory below the device that the core needs."""

    num_host_blocks: int = 0
    """Size of the host memory, in blocks; 0: there is none."""
    is_buffer: bool = False
    """Whether none is configured: it only passes data on to the tier below."""
    disk: DiskFacts | None = None
    objects: ObjectFacts | None = None


def lower_device_bytes(config: EngineConfig, spec: ModelSpec, device: torch.device) -> int:
    """Return how much device memory the stores need."""
    return choose_staging_bytes(spec, config.snapshot_dtype) if config.has_tiers and device.type == "cuda" else 0


def attach_stores(
    config: EngineConfig,
    arena: ArenaTensors,
    transfers: Transfers,
    weights: str,
    ranks: Ranks = ONE_RANK,
    *,
    progress: bool,
) -> tuple[LowerFacts, FileStore | None]:
    """Create this rank's configured stores; also return the disk's.

    Args:
        weights: a digest of the model's weights.

    Raises:
        ConfigError: the directory of the disk cache or the object store cannot be used, a size has no room for a
            snapshot, or there is not so much host memory for all ranks.
    """
    if not config.has_tiers:
        return LowerFacts(), None
    spec, num_blocks = arena.spec, buffer_blocks(arena.spec, config.snapshot_dtype)
    if config.host_memory is not None:
        num_blocks = blocks_below(config.host_memory, "--host-memory", spec, config.snapshot_dtype)
    _require_host_memory(config, spec, num_blocks * spec.block_bytes, ranks.size)
    num_disk_blocks = _num_blocks(config.disk_cache_size, DISK_CACHE_SIZE, "--disk-cache-size", config, spec)
    num_object_blocks = _num_blocks(config.object_store_size, OBJECT_STORE_SIZE, "--object-store-size", config, spec)
    slots = slot_encoding(spec, config.snapshot_dtype)
    new_store = PinnedStore if arena.bytes.device.type == "cuda" else HostStore
    host = new_store(arena, num_blocks, transfers.completions, slots)
    transfers.attach(HOST_STORE, host)
    facts = LowerFacts(num_blocks, config.host_memory is None)
    layout = _layout(config, spec, weights, arena.bytes.device, ranks)
    below = host, ArenaCopies(arena, slots), transfers.completions
    if config.object_store is not None:
        files = open_object_files(config.object_store, layout, spec, config.snapshot_dtype)
        transfers.attach(OBJECT_STORE, FileStore(OBJECT_STORE, files, {}, *below))
        return replace(facts, objects=ObjectFacts(config.object_store, num_object_blocks, layout)), None
    if config.disk_cache is None:
        return facts, None
    start_s = SYSTEM_CLOCK()
    sizes = spec.stored_snapshots(config.snapshot_dtype).sizes_bytes
    directory = DiskDirectory(Path(config.disk_cache), layout, spec.raw_block_bytes, sizes, ranks.rank)
    if ranks.rank == 0:
        directory.remove_ranks_from(ranks.size)
    with tqdm(desc="disk cache", disable=None if progress else True, unit="file", leave=False, delay=1) as bar:
        found = directory.scan(bar.update)
    store = FileStore(DISK_STORE, directory, found.addresses, *below)
    transfers.attach(DISK_STORE, store)
    disk = DiskFacts(
        str(directory.path),
        num_disk_blocks,
        directory.key,
        [found.kept],
        SYSTEM_CLOCK() - start_s,
    )
    return replace(facts, disk=disk), store


def open_object_files(url: str, layout: dict[str, str], spec: ModelSpec, snapshot_dtype: str) -> ObjectFiles:
    """Open the files of a layout in an object store.

    Raises:
        ConfigError: it cannot be read or written.
    """
    sizes = spec.stored_snapshots(snapshot_dtype).sizes_bytes
    files = ObjectFiles(url, layout, spec.raw_block_bytes, sizes)
    try:
        files.require_access()
    except OSError as error:
        files.close()
        raise ConfigError(f"--object-store {url} cannot be used: {cause_of(error)}") from error
    return files


def _num_blocks(size: str | int | None, default: str, name: str, config: EngineConfig, spec: ModelSpec) -> int:
    """Return the size of a tier in files, in blocks."""
    return blocks_below(default if size is None else size, name, spec, config.snapshot_dtype)


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
    flag = "--disk-cache" if config.disk_cache is not None else "--object-store"
    raise ConfigError(
        f"{flag} needs a buffer of {num_bytes:,} bytes of host memory{each}, which {found}; give --host-memory, "
        f"of at least {least_bytes:,} bytes, or leave out {flag}"
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
