"""The stores below the device: host memory and, below that, a disk or an object store."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from strandline.clock import SYSTEM_CLOCK
from strandline.config import EngineConfig
from strandline.device.hardware.dtypes import machine_bytes
from strandline.device.stores.arena_copies import ArenaCopies
from strandline.device.stores.file_store import Files, FileStore
from strandline.device.stores.host_store import HOST_STORE, HostStore, PinnedStore, choose_staging_bytes
from strandline.device.stores.snapshot_encoding import slot_encoding
from strandline.device.stores.transfers import Transfers
from strandline.errors import ConfigError, cause_of
from strandline.file_tiers import DISK, OBJECTS, FileTier, shared_directory
from strandline.kernels.arena import ArenaTensors
from strandline.kernels.ranks import ONE_RANK, Ranks
from strandline.records.persisted import PersistedEntries
from strandline.specs import ModelSpec
from strandline.tier_sizes import blocks_below, buffer_blocks, least_bytes_below
from strandline.transfer.disk_directory import DiskDirectory
from strandline.transfer.layout import layout_of
from strandline.transfer.object_files import SALT_KEY, ObjectFiles
from strandline.transfer.shared_directory import SharedDirectory
from strandline.transfer.stored_files import Located
from strandline.version import VERSION


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts about a tier in files that the core needs."""

    tier: FileTier
    num_blocks: int
    """Its size, or as much of it as the engine uses."""
    location: str
    """A directory or a URL; on a rank, the rank's."""
    key: bytes
    """What salts are hashed with."""
    layout: dict[str, str] = field(default_factory=dict)
    """That of the first rank's files, where further ones are found while the engine runs."""
    persisted: list[PersistedEntries] = field(default_factory=list)
    """Entries from earlier processes, in a list of one, which the core empties; on a rank, the rank's part. Empty: all
    are found while the engine runs."""
    scan_s: float = 0.0
    """Time to read them."""


@dataclass(frozen=True, slots=True)
class LowerFacts:
    """Facts about memory below the device that the core needs."""

    num_host_blocks: int = 0
    """Size of the host memory, in blocks; 0: there is none."""
    is_buffer: bool = False
    """Whether none is configured: it only passes data on to the tier below."""
    files: FileFacts | None = None
    """The tier below that; None: there is none."""


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
    """Create this rank's configured stores; also return that of files.

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
    tier, num_file_blocks = config.file_tier, 0
    if tier is not None:
        num_file_blocks = blocks_below(tier.size, tier.kind.size_flag, spec, config.snapshot_dtype)
    slots = slot_encoding(spec, config.snapshot_dtype)
    new_store = PinnedStore if arena.bytes.device.type == "cuda" else HostStore
    host = new_store(arena, num_blocks, transfers.completions, slots)
    transfers.attach(HOST_STORE, host)
    facts = LowerFacts(num_blocks, config.host_memory is None)
    if tier is None:
        return facts, None
    layout = _layout(config, spec, weights, arena.bytes.device, ranks)
    if tier.kind != DISK:
        size_bytes = num_file_blocks * spec.block_bytes
        files = open_object_files(tier.location, layout, spec, config.snapshot_dtype, size_bytes)
        opened = _OpenFiles(FileFacts(tier.kind, num_file_blocks, tier.location, SALT_KEY, layout), files, {})
    else:
        sizes = spec.stored_snapshots(config.snapshot_dtype).sizes_bytes
        directory = DiskDirectory(Path(tier.location), layout, spec.raw_block_bytes, sizes, ranks.rank)
        opened = _read_directory(directory, num_file_blocks, ranks, progress=progress)
    copies = ArenaCopies(arena, slots)
    store = FileStore(tier.kind.store, opened.files, opened.addresses, host, copies, transfers.completions)
    transfers.attach(tier.kind.store, store)
    return replace(facts, files=opened.facts), store


class _OpenFiles(NamedTuple):
    """The files of a tier."""

    facts: FileFacts
    files: Files
    addresses: dict[int, Located]
    """Locations of all entries that they hold at the start."""


def _read_directory(directory: DiskDirectory, num_blocks: int, ranks: Ranks, *, progress: bool) -> _OpenFiles:
    """Read what earlier processes have written to the directory of this rank.

    Args:
        num_blocks: its size.
    """
    start_s = SYSTEM_CLOCK()
    if ranks.rank == 0:
        directory.remove_ranks_from(ranks.size)
    with tqdm(desc=DISK.title, disable=None if progress else True, unit="file", leave=False, delay=1) as bar:
        found = directory.scan(bar.update)
    scan_s = SYSTEM_CLOCK() - start_s
    facts = FileFacts(DISK, num_blocks, str(directory.path), directory.key, persisted=[found.persisted], scan_s=scan_s)
    return _OpenFiles(facts, directory, found.addresses)


def open_object_files(
    url: str, layout: dict[str, str], spec: ModelSpec, snapshot_dtype: str, size_bytes: int
) -> ObjectFiles | SharedDirectory:
    """Open the files of a layout in an object store.

    Args:
        size_bytes: the size of a shared directory. A bucket's rules expire what is old.

    Raises:
        ConfigError: it cannot be read or written.
    """
    sizes, directory = spec.stored_snapshots(snapshot_dtype).sizes_bytes, shared_directory(url)
    files: ObjectFiles | SharedDirectory
    if directory is not None:
        files = SharedDirectory(Path(directory), layout, spec.raw_block_bytes, sizes, size_bytes)
    else:
        files = ObjectFiles(url, layout, spec.raw_block_bytes, sizes)
    try:
        files.require_access()
    except OSError as error:
        files.close()
        raise ConfigError(f"{OBJECTS.flag} {url} cannot be used: {cause_of(error)}") from error
    return files


def _require_host_memory(config: EngineConfig, spec: ModelSpec, num_bytes: int, num_ranks: int) -> None:
    """Check that the machine has the host memory of all ranks and engines, or that of their buffers before files.

    Raises:
        ConfigError: it does not.
    """
    have, num_sharing = machine_bytes(), num_ranks * config.data_parallel_size
    if num_bytes * num_sharing <= have:
        return
    each = f" for each of {num_sharing} {'ranks' if num_ranks > 1 else 'engines'}" if num_sharing > 1 else ""
    found = f"is more than the {have:,} bytes of memory that there are"
    tier = config.file_tier
    if config.host_memory is not None or tier is None:
        raise ConfigError(f"--host-memory of {num_bytes:,} bytes{each} {found}; lower it")
    least_bytes, flag = least_bytes_below(spec, config.snapshot_dtype), tier.kind.flag
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
