"""The configuration of transfers between engines: names and meanings are vLLM's where vLLM has the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from ipaddress import ip_address, ip_network
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

FLAG: Final = "--kv-transfer-config"
EXAMPLE: Final = '{"kv_connector": "SocketConnector", "kv_role": "kv_both", "kv_ip": "127.0.0.1", "kv_port": 0}'
CONNECTORS: Final = ("SocketConnector", "NixlConnector")
ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
EXTRA: Final = "kv_connector_extra_config"
EXTRA_FIELDS: Final = ("lease_s", "timeout_s", "peers", "backends")
DEFAULT_LEASE_S: Final = 30.0
DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_BACKENDS: Final = ("UCX",)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Whether an engine sends prefixes to other engines, fetches prefixes from them, or both, and where it listens.

    Raises:
        ConfigError: a value is out of range.
    """

    kv_connector: str
    """The transport: ``SocketConnector`` (TCP) or ``NixlConnector``."""
    kv_role: str
    kv_ip: str = "127.0.0.1"
    """The address that the engine listens on and advertises to other engines."""
    kv_port: int = 0
    """The port, also advertised; 0: any free port."""
    engine_id: str | None = None
    """None: a random id at each start."""
    kv_connector_extra_config: Mapping[str, Any] | None = None
    """``lease_s``: how long a prompt is held for the engine that continues it. ``timeout_s``: how long a peer may be
    silent. ``peers``: hosts to fetch from, as names, patterns or networks; by default this machine only. ``backends``:
    NIXL plugins."""

    def __post_init__(self) -> None:
        if self.kv_connector not in CONNECTORS:
            raise ConfigError(f"{FLAG}: kv_connector must be one of {', '.join(CONNECTORS)}; got {self.kv_connector!r}")
        if self.kv_role not in ROLES:
            raise ConfigError(f"{FLAG}: kv_role must be one of {', '.join(ROLES)}; got {self.kv_role!r}")
        for name in ("kv_ip", "engine_id"):
            value: object = getattr(self, name)
            if (type(value) is not str or not value) and (name, value) != ("engine_id", None):
                raise ConfigError(f"{FLAG}: {name} must be a string, got {value!r}")
        if self.kv_ip in ("0.0.0.0", "::", "*"):
            raise ConfigError(f"{FLAG}: kv_ip is advertised to other engines: set it to an address of this machine")
        if type(self.kv_port) is not int or not 0 <= self.kv_port <= 65535:
            raise ConfigError(f"{FLAG}: kv_port must be a port or 0, got {self.kv_port!r}")
        extra: object = self.kv_connector_extra_config
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(f"{FLAG}: {EXTRA} must be a mapping, got {extra!r}")
        for name in self._extra:
            if name not in EXTRA_FIELDS:
                raise ConfigError(f"{FLAG}: unknown field {name!r} of {EXTRA}; known are {', '.join(EXTRA_FIELDS)}")
        for name in ("lease_s", "timeout_s"):
            seconds: object = self._extra.get(name, 1)
            if type(seconds) not in (int, float) or not 0 < float(str(seconds)) <= 86_400:
                raise ConfigError(f"{FLAG}: {name} must be a number of seconds from 0 to 86400, got {seconds!r}")
        for name, what in (("peers", "hosts"), ("backends", "names")):
            texts: object = self._extra.get(name, [])
            if not isinstance(texts, list | tuple) or not all(type(text) is str for text in texts):
                raise ConfigError(f"{FLAG}: {name} must be a list of {what}, got {texts!r}")
        if "backends" in self._extra and (self.kv_connector != "NixlConnector" or not self.backends):
            raise ConfigError(f"{FLAG}: backends is for NixlConnector, and needs at least one entry")

    @property
    def _extra(self) -> Mapping[str, Any]:
        return self.kv_connector_extra_config or {}

    @property
    def is_producer(self) -> bool:
        """Whether other engines may fetch from this one."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether this engine fetches from others."""
        return self.kv_role != "kv_producer"

    @property
    def lease_s(self) -> float:
        """How long a prompt is held for the engine that continues it."""
        return float(self._extra.get("lease_s", DEFAULT_LEASE_S))

    @property
    def timeout_s(self) -> float:
        """How long a peer may be silent."""
        return float(self._extra.get("timeout_s", DEFAULT_TIMEOUT_S))

    @property
    def backends(self) -> Sequence[str]:
        """NIXL's transport plugins."""
        backends: Sequence[str] = self._extra.get("backends", DEFAULT_BACKENDS)
        return backends

    def may_fetch_from(self, host: str) -> bool:
        """Whether requests may fetch from this host. Data from a malicious host would be served to all users."""
        peers: Sequence[str] = self._extra.get("peers", ("localhost", "127.0.0.0/8", "::1"))
        return any(fnmatch(host, peer) or _is_in(host, peer) for peer in peers)


def _is_in(host: str, network: str) -> bool:
    try:
        return ip_address(host) in ip_network(network, strict=False)
    except ValueError:
        return False


def read_kv_transfer_config(value: str | Mapping[str, Any]) -> KVTransferConfig:
    """Read the configuration from a mapping, or from JSON.

    Raises:
        ConfigError: the value is not a mapping, a field is unknown or missing, or a value is out of range.
    """
    known = [field.name for field in fields(KVTransferConfig)]
    given = read_json_option(FLAG, value, known=known, example=EXAMPLE)
    for name in ("kv_connector", "kv_role"):
        if name not in given:
            raise ConfigError(f"{FLAG}: {name} is missing; an example is {EXAMPLE}")
    return KVTransferConfig(**given)
