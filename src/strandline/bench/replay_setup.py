"""What a trace is replayed on: the simulated machine, and which of the trace's sessions start when."""

from argparse import Namespace
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from strandline.bench.known_models import cost_model, geometry
from strandline.bench.replica import Machine
from strandline.bench.synthetic import SYNTHETIC, synthetic_lanes
from strandline.bench.traces import Lane, read_trace
from strandline.config import parse_bytes
from strandline.errors import ConfigError
from strandline.tier_sizes import blocks_below

MIN_SLOTS = 6
"""Slots that a simulated device's memory holds, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """A machine but for its memory budget, and limits of a trace.

    Raises:
        ConfigError: a number is out of range.
    """

    geometry: str
    max_num_seqs: int
    max_num_batched_tokens: int
    host_memory: str | None
    """Size of the host memory below the device; None: there is none."""
    host_bandwidth_gbps: float
    """Bytes per ns that are loaded from there."""
    disk_cache_size: str | None
    """Size of the disk below that; None: there is none."""
    disk_bandwidth_gbps: float
    """Bytes per ns that the disk reads, and writes."""
    snapshot_dtype: str
    """The dtype of snapshots that rest below the device."""
    max_sessions: int | None
    session_gap_s: float
    speed: float
    """Speed of the device as a multiple of one H200."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters that the lanes use in turn; none: they use the model alone."""
    max_loras: int = 1
    """Adapters that a step can use."""

    @classmethod
    def from_flags(cls, options: Namespace) -> "ReplaySetup":
        """Return what the flags of a command describe.

        Raises:
            ConfigError: a number is out of range.
        """
        return cls(
            geometry=options.geometry,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            host_memory=options.host_memory,
            host_bandwidth_gbps=options.host_bandwidth,
            disk_cache_size=options.disk_cache_size,
            disk_bandwidth_gbps=options.disk_bandwidth,
            snapshot_dtype=options.snapshot_dtype,
            max_sessions=options.max_sessions,
            session_gap_s=options.session_gap,
            speed=options.speed,
            lora_modules=tuple(options.lora_modules),
            max_loras=options.max_loras,
        )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_sessions", "max_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not self.session_gap_s >= 0:
            raise ConfigError(f"--session-gap must be at least 0, got {self.session_gap_s:g}")
        for name in ("host", "disk"):
            rate = getattr(self, f"{name}_bandwidth_gbps")
            if not rate > 0:
                raise ConfigError(f"--{name}-bandwidth must be above 0, got {rate:g}")
        if not self.speed > 0:
            raise ConfigError(f"--speed must be above 0, got {self.speed:g}")

    def lanes(self, trace: str) -> list[Lane]:
        """Return the lanes of a file or of a workload.

        Raises:
            ConfigError: there is no such trace, or its format is unknown.
        """
        if trace in SYNTHETIC or not Path(trace).exists():
            lanes = synthetic_lanes(trace)[: self.max_sessions]
        else:
            lanes = read_trace(trace, max_sessions=self.max_sessions, session_gap_s=self.session_gap_s)
        adapters = cycle(self.lora_modules or ("",))
        return [replace(lane, adapter=adapter) for lane, adapter in zip(lanes, adapters, strict=False)]

    def machine(self, memory: str) -> Machine:
        """Return the machine with a memory budget, such as ``20GiB``.

        Raises:
            ConfigError: there is no such geometry, or a size is none or too small.
        """
        spec = geometry(self.geometry)
        spec = replace(spec, has_window_blocks=spec.has_windows)
        memory_bytes = parse_bytes(memory)
        num_slots = memory_bytes // spec.slab_bytes
        if num_slots < MIN_SLOTS:
            raise ConfigError(
                f"memory of {memory_bytes:,} bytes is {num_slots} slots of {self.geometry}; give {MIN_SLOTS} or more"
            )

        def below(size: str | None, name: str) -> int:
            if size is None:
                return 0
            blocks_below(size, name, spec, self.snapshot_dtype)  # the engine's own check
            return parse_bytes(size, name)

        return Machine(
            spec,
            cost_model(self.geometry).sped_up(self.speed),
            memory_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            host_bytes=below(self.host_memory, "--host-memory"),
            snapshot_dtype=self.snapshot_dtype,
            disk_bytes=below(self.disk_cache_size, "--disk-cache-size"),
            disk_bytes_per_s=self.disk_bandwidth_gbps * 1e9,
            host_bytes_per_s=self.host_bandwidth_gbps * 1e9,
            max_loras=self.max_loras,
        )
