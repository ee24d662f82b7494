"""The configuration of each of a server's engines: what cannot be shared gets the engine's number, as in vLLM."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from strandline.config import EngineConfig
from strandline.errors import ConfigError
from strandline.kv_events_config import FLAG as EVENTS_FLAG
from strandline.kv_events_config import KVEventsConfig
from strandline.kv_transfer_config import FLAG as TRANSFER_FLAG
from strandline.kv_transfer_config import KVTransferConfig

MAX_PORT: Final = 65535


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return the configurations of all engines.

    Raises:
        ConfigError: engines would use each other's ports.
    """
    configs = [_config_of(config, rank) for rank in range(config.data_parallel_size)]
    endpoints = [endpoint for each in configs for endpoint in _event_endpoints(each)]
    size = config.data_parallel_size
    if size > 1 and len(set(endpoints)) < len(endpoints):
        raise ConfigError(
            f"{EVENTS_FLAG}: with --data-parallel-size {size} each engine adds its number to the ports, so those of "
            f"endpoint and replay_endpoint must be at least {size} apart"
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


def _event_endpoints(config: EngineConfig) -> Iterator[str]:
    """Yield the endpoints of an engine's events that no other engine can have, too."""
    events = config.kv_events
    endpoints = () if events is None else (events.endpoint, events.replay_endpoint)
    yield from (each for each in endpoints if each is not None and not each.endswith((":*", ":0")))
