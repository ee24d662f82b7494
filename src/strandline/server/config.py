"""Configuration of the HTTP server: the flags of ``strandline serve`` that do not concern the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2s
from typing import Final

from strandline.env import API_KEY, read_api_key
from strandline.errors import ConfigError

CACHE_PAGES: Final = ("auto", "text", "counts", "off")
LOCAL_NAMES: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_name: Sequence[str] = ()
    """Names that requests may use; empty: the model's."""
    api_key: Sequence[str] = ()
    salt_per_key: bool = False
    """Requests share cached prefixes only with requests of the same key."""
    chat_template: str | None = None
    """A file, or the template itself."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; ``auto`` derives it from the chat template."""
    reasoning_parser: str = "auto"
    """How it writes reasoning; ``auto`` derives it from the chat template."""
    enable_auto_tool_choice: bool = False
    """No effect, for compatibility with vLLM: requests with tools may always call them."""
    max_queue: int = 1024
    """Most outputs that are queued besides those that run."""
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float | None = None
    client_timeout_s: float = 60.0
    """Time limit for a client to read a part of its response; 0: no limit."""
    restart: bool = False
    """Restart the engine when its process has exited."""
    cache_page: str = "auto"
    """What ``/cache`` shows. ``auto``: prompts' text if the server listens on this machine alone, else counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if self.max_queue < 0 or self.max_body_bytes < 1:
            raise ConfigError("max_queue must be at least 0 and max_body_bytes at least 1")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s must be above 0, got {self.request_timeout_s:g}")
        if not self.client_timeout_s >= 0:
            raise ConfigError(f"client_timeout_s must be at least 0, got {self.client_timeout_s:g}")
        if self.cache_page not in CACHE_PAGES:
            raise ConfigError(f"cache_page must be one of {', '.join(CACHE_PAGES)}; got {self.cache_page!r}")

    def key_salts(self) -> dict[str, str]:
        """Return the valid keys, the environment's included, each with the prefix of its requests' salts.

        Raises:
            ConfigError: each key is to have a salt, and there is no key.
        """
        key = read_api_key()
        keys = [*self.api_key, *([key] if key else [])]
        if self.salt_per_key and not keys:
            raise ConfigError(
                f"--salt-per-key gives each API key a salt, and there is none; add --api-key or {API_KEY}"
            )
        return {key: salt_of_key(key) if self.salt_per_key else "" for key in keys}

    def page_mode(self) -> str:
        """Return what the cache page shows; ``auto`` shows text to this machine alone."""
        if self.cache_page != "auto":
            return self.cache_page
        return "local" if self.host in LOCAL_NAMES else "counts"


def salt_of_key(key: str) -> str:
    """Return the prefix of the salts of a key's requests: the same on every server, at any time."""
    return blake2s(key.encode(), digest_size=16, person=b"salt").hexdigest() + "/"
