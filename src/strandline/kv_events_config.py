"""The configuration of cache events: names, meanings and defaults are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from strandline.errors import ConfigError
from strandline.json_options import read_json_option

PUBLISHERS: Final = ("null", "zmq")
FLAG: Final = "--kv-events-config"
EXAMPLE: Final = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Whether and where an engine publishes what its cache can resume.

    Raises:
        ConfigError: a value is out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """``zmq``, or ``null``: none; None: ``zmq`` if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """The PUB socket binds to it if it contains ``*`` or ``::`` or begins with ``ipc://`` or ``inproc://``; else it
    connects to it."""
    replay_endpoint: str | None = None
    """Endpoint for requests to replay missed messages; None: no replay."""
    buffer_steps: int = 10_000
    """Maximum number of messages kept for replay."""
    hwm: int = 100_000
    """Maximum number of messages queued for one slow subscriber; further ones are not sent to it."""
    max_queue_size: int = 100_000
    """Maximum number of steps with unsent events; events of further steps are dropped."""
    topic: str = ""

    def __post_init__(self) -> None:
        got: object = self.enable_kv_cache_events
        if type(got) is not bool:
            raise ConfigError(f"{FLAG}: enable_kv_cache_events must be true or false, got {got!r}")
        if self.publisher not in (None, *PUBLISHERS):
            raise ConfigError(f"{FLAG}: publisher must be one of {', '.join(PUBLISHERS)}; got {self.publisher!r}")
        for name in ("endpoint", "replay_endpoint", "topic"):
            value = getattr(self, name)
            if type(value) is not str and (name, value) != ("replay_endpoint", None):
                raise ConfigError(f"{FLAG}: {name} must be a string, got {value!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigError(f"{FLAG}: {name} must be a whole number of at least 1, got {value!r}")

    @property
    def is_bound(self) -> bool:
        """Whether the PUB socket binds to its endpoint, as in vLLM; else it connects to it."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))

    @property
    def is_published(self) -> bool:
        """Whether events are collected and sent."""
        return self.enable_kv_cache_events and self.publisher != "null"


def read_kv_events_config(value: str | Mapping[str, Any]) -> KVEventsConfig:
    """Read the configuration from a mapping, or from JSON.

    Raises:
        ConfigError: the value is not a mapping, a field is unknown, or a value is out of range.
    """
    known = (field.name for field in fields(KVEventsConfig))
    return KVEventsConfig(**read_json_option(FLAG, value, known=known, example=EXAMPLE))
