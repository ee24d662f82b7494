"""The configuration of each of a server's engines: what cannot be shared gets the engine's number, as in vLLM."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kv_events_config import FLAG as EVENTS_FLAG
from strandline.kv_events_config import KVEventsConfig
from strandline.kv_transfer_config import FLAG as TRANSFER_FLAG
from strandline.kv_transfer_config import KVTransferConfig
from strandline.server.http.host_names import MAX_PORT, is_local

WILDCARDS: Final = ("*", "0.0.0.0", "::")
"""Hosts that stand for every address of this machine."""


@dataclass(frozen=True, slots=True)
class _Socket:
    """A socket of an engine with a fixed address."""

    rank: int
    flag: str
    field: str
    host: str
    """In lower case, without brackets; of a socket without a port, the whole endpoint."""
    port: int | None
    is_bound: bool = True

    @property
    def name(self) -> str:
        return f"{self.field} of {self.flag} for engine {self.rank}"

    def overlaps(self, other: "_Socket") -> bool:
        """Return whether both cannot be, or one that connects would reach the other, which is of this server."""
        if self.port != other.port:
            return False
        for one, two in ((self, other), (other, self)):
            if one.is_bound and one.host in WILDCARDS and (two.is_bound or is_local(two.host)):
                return True
        return self.host == other.host


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the configurations of all engines.

    Raises:
        ConfigError: engines would use each other's ports.
    """
    size = config.data_parallel_size
    configs = [_config_of(config, rank) for rank in range(size)]
    sockets = [each for config in configs for each in _sockets(config)] if size > 1 else []
    for one, other in combinations(sockets, 2):
        if one.overlaps(other):
            address = other.host if other.port is None else f"port {other.port}"
            raise ConfigError(
                f"{one.name} and {other.name} both use {address}: with --data-parallel-size {size} each engine adds "
                f"its number to its ports, so these must be at least {size} apart"
            )
    return configs


def _config_of(config: EngineConfig, rank: int) -> EngineConfig:
    """Return an engine's configuration. The first one's files and ports are those that were given."""
    changes: dict[str, Any] = {"data_parallel_rank": rank}
    if rank and config.kv_events is not None:
        changes["kv_events_config"] = asdict(_numbered_events(config.kv_events, rank))
    if rank and config.kv_transfer is not None:
        changes["kv_transfer_config"] = asdict(_numbered_transfer(config.kv_transfer, rank))
    if rank and config.disk_cache is not None:
        changes["disk_cache"] = str(Path(config.disk_cache) / f"engine-{rank}")
    return replace(config, **changes)


def _numbered_events(config: KVEventsConfig, rank: int) -> KVEventsConfig:
    replay = config.replay_endpoint
    return replace(
        config,
        endpoint=_numbered_endpoint(config.endpoint, rank),
        replay_endpoint=None if replay is None else _numbered_endpoint(replay, rank),
    )


def _numbered_endpoint(endpoint: str, rank: int) -> str:
    """Return an endpoint with its port plus the engine's number, or with a suffix if it is a path."""
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{base}:{_numbered_port(int(port), rank, EVENTS_FLAG)}" if port.isdigit() else endpoint


def _numbered_transfer(config: KVTransferConfig, rank: int) -> KVTransferConfig:
    engine_id = config.engine_id
    return replace(
        config,
        kv_port=_numbered_port(config.kv_port, rank, TRANSFER_FLAG),
        engine_id=None if engine_id is None else f"{engine_id}_dp{rank}",
    )


def _numbered_port(port: int, rank: int, flag: str) -> int:
    """Return a port plus the engine's number. 0, any free port, stays.

    Raises:
        ConfigError: there is no such port.
    """
    if port and port + rank > MAX_PORT:
        raise ConfigError(f"{flag}: engine {rank} adds its number to port {port}, which is more than {MAX_PORT}")
    return port + rank if port else 0


def _sockets(config: EngineConfig) -> Iterator[_Socket]:
    """Yield an engine's sockets whose addresses no other socket of the server can have, too."""
    rank, events, transfer = config.data_parallel_rank, config.kv_events, config.kv_transfer
    if events is not None:
        endpoints = {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}
        for field, endpoint in endpoints.items():
            if endpoint is not None and not endpoint.endswith((":*", ":0")):
                is_bound = field == "replay_endpoint" or events.is_bound
                yield _Socket(rank, EVENTS_FLAG, field, *_address(endpoint), is_bound)
    if transfer is not None and transfer.is_producer and transfer.kv_port:
        yield _Socket(rank, TRANSFER_FLAG, "kv_port", _host(transfer.kv_ip), transfer.kv_port)


def _address(endpoint: str) -> tuple[str, int | None]:
    """Return the host and the port of an endpoint; if it has no port, the whole endpoint."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (_host(host), int(port)) if endpoint.startswith("tcp://") and port.isdigit() else (endpoint, None)


def _host(name: str) -> str:
    """Return a host's name in the form in which names are compared."""
    plain = name.lower().strip("[]")
    return "127.0.0.1" if plain == "localhost" else plain
