"""The arguments of ``strandline.ray.build_app``, from the command line (all strings) or from YAML."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from strandline.config import EngineConfig, reject_unknown
from strandline.errors import ConfigError
from strandline.routing.names import make_router
from strandline.server.config import ServerConfig

UNUSED: Final = frozenset(
    {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh"}
    | {"log_format", "log_level", "enable_log_requests", "otlp_traces_endpoint"}
)
"""Options of ``strandline serve`` that concern its connections and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What to deploy.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str = "demo"
    num_replicas: int = 1
    """Engines. Without effect where ``replica`` has an ``autoscaling_config``."""
    num_ingresses: int = 1
    """Processes for HTTP and text. Each routes independently."""
    router: str = "strandline"
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``LLM`` and of ``strandline serve``, with underscores."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``strandline serve`` that do not concern the engine, with underscores."""
    replica: Mapping[str, Any] = field(default_factory=dict)
    """Options of Ray Serve for the replicas, such as ``ray_actor_options`` and ``autoscaling_config``."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_ingresses"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        make_router(self.router)
        if "model" in self.engine or "kv_events_config" in self.engine:
            raise ConfigError("model is set outside of engine, and each replica chooses its own kv_events_config")
        if "data_parallel_size" in self.engine:
            raise ConfigError("data_parallel_size is for strandline serve; on Ray Serve, set num_replicas")

    @property
    def engine_config(self) -> EngineConfig:
        """Return the configuration of each replica's engine.

        Raises:
            ConfigError: an option is unknown, or a value is out of range.
        """
        return EngineConfig.from_options({"model": self.model, **self.engine})

    @property
    def server_config(self) -> ServerConfig:
        """Return the configuration of the HTTP part. Raises as ``engine_config``."""
        reject_unknown(self.server, [each.name for each in fields(ServerConfig)])
        if unused := sorted(UNUSED.intersection(self.server)):
            raise ConfigError(f"{unused[0]} is for strandline serve; Ray Serve has its own TLS, logs and traces")
        return ServerConfig(**self.server)


def read_options(given: Mapping[str, Any]) -> RayOptions:
    """Read the arguments.

    Raises:
        ConfigError: one is unknown, or its value is out of range.
    """
    reject_unknown(given, [each.name for each in fields(RayOptions)])
    counts = {name: _count(name, given[name]) for name in ("num_replicas", "num_ingresses") if name in given}
    return RayOptions(**{**given, **counts})


def _count(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from error
