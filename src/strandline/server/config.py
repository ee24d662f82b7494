"""Configuration of the HTTP server: the flags of ``strandline serve`` that do not concern the engine."""

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2s
from math import inf
from typing import Any, Final

from strandline.config import flag, parse_bytes
from strandline.env import API_KEY, read_api_key
from strandline.errors import ConfigError, RequestError
from strandline.log_format import LOG_FORMATS, LOG_LEVELS
from strandline.server.engines.tenants import KeyLimits, Tenant, owner_digest
from strandline.server.http.cross_origin import ORIGIN, TOKEN, CrossOrigin
from strandline.server.http.host_names import is_local, parse_host
from strandline.server.http.tls import TlsFiles
from strandline.server.keys_file import LIMITS, NamedKey, check_limit, read_keys_file
from strandline.text.prompts import check_template_options

CACHE_PAGES: Final = ("auto", "text", "counts", "off")
MAX_BODY_BYTES: Final = 8 * 2**20
MAX_BODY_BYTES_WITH_PICTURES: Final = 64 * 2**20
"""A conversation with screenshots sends all of them again in every turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    allowed_hosts: Sequence[str] = ()
    """Host names that requests may use in addition to local ones; ``*``: any. Empty: none on a loopback address, else
    any."""
    allowed_origins: Sequence[str] = ()
    """Origins whose web pages may send requests and read the answers; ``*``: any. Empty: none."""
    allow_credentials: bool = False
    """Pages of these origins may send cookies."""
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    served_model_name: Sequence[str] = ()
    """Names that requests may use; empty: the model's."""
    api_key: Sequence[str] = ()
    api_keys_file: str | None = None
    """File of further keys, with their names and limits."""
    max_requests_per_minute: int | None = None
    """Limit of each key, or of all requests if there are no keys; None: no limit."""
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    salt_per_key: bool = False
    """Requests share cached prefixes only with requests of the same key."""
    chat_template: str | None = None
    """A file, or the template itself."""
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for requests that do not set them."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that take the place of those in the model's ``generation_config.json``."""
    parse_special_tokens: bool = False
    """Parse control tokens in user and tool messages, as vLLM does, instead of treating them as plain text."""
    keep_client_telemetry: bool = False
    """Keep known telemetry that clients write into system prompts, which would prevent hits."""
    tool_call_parser: str = "auto"
    """Format of tool calls; ``auto`` detects it from the chat template."""
    reasoning_parser: str = "auto"
    """Format of reasoning; ``auto`` detects it from the chat template."""
    reasoning_field: str = "both"
    """Field of chat completions' messages that holds the reasoning: ``reasoning``, ``reasoning_content`` or both."""
    enable_auto_tool_choice: bool = False
    """No effect, for compatibility with vLLM: requests with tools may always call them."""
    max_queue: int = 1024
    """Maximum number of queued outputs, in addition to those that run."""
    max_body_bytes: int | None = None
    """None: 8 MiB, or 64 MiB if the model reads pictures."""
    response_store: str | int = "64MiB"
    """Memory for responses of ``/v1/responses`` that later requests continue: bytes, or a string such as ``64MiB``; 0:
    nothing is stored."""
    request_timeout_s: float | None = None
    client_timeout_s: float = 60.0
    """Time limit for a client to send a request's head, a part of its body, or read a part of its response; 0: none."""
    stream_interval: int = 1
    """Tokens of an output that a stream sends together, after the first one; more take less CPU time."""
    stream_ping_interval_s: float = 5.0
    """Silence after which a stream gets a comment, or Anthropic's event ``ping``; 0: none."""
    allow_runtime_lora: str | None = None
    """Directory that ``/v1/load_lora_adapter`` may load adapters from; None: nothing is loaded at runtime."""
    enable_admin_endpoints: bool = False
    """Serve the administrative endpoints without an API key, or with keys that have salts of their own."""
    restart: bool = False
    """Restart the engine when its process has exited."""
    ssl_certfile: str | None = None
    """The server's certificate, in PEM format; None: no TLS."""
    ssl_keyfile: str | None = None
    """Its key; None: it is in ``ssl_certfile``."""
    ssl_ca_certs: str | None = None
    """Certificates of the authorities that sign those of clients."""
    ssl_cert_reqs: int = ssl.CERT_NONE
    """Whether clients need a certificate: 0 no, 1 one that is sent is checked, 2 yes."""
    enable_ssl_refresh: bool = False
    """Read these files again when they change."""
    log_format: str = "text"
    """Format of all logs: lines of ``text``, or of ``json``."""
    log_level: str = "info"
    """Least level of messages in all logs: ``info``, ``warning`` or ``error``."""
    enable_log_requests: bool = False
    """Log each finished request, without its texts."""
    otlp_traces_endpoint: str | None = None
    """Collector of OpenTelemetry traces; None: there are none."""
    cache_page: str = "auto"
    """Content of ``/cache``. ``auto``: prompts' text if the server listens on this machine only, else counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        for name in self.allowed_hosts:
            if name != "*" and parse_host(name.removeprefix("*.").encode(errors="replace") + b":0") is None:
                raise ConfigError(
                    f"--allowed-hosts must be names without ports, as api.example.com, *.example.com or *: got {name!r}"
                )
        _require_texts("--api-key", self.api_key)
        _require_texts("--served-model-name", self.served_model_name)
        if self.max_queue < 0 or (self.max_body_bytes is not None and self.max_body_bytes < 1):
            raise ConfigError("--max-queue must be at least 0 and --max-body-bytes at least 1")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"--request-timeout-s must be above 0, got {self.request_timeout_s:g}")
        if not self.client_timeout_s >= 0:
            raise ConfigError(f"--client-timeout-s must be at least 0, got {self.client_timeout_s:g}")
        if self.stream_interval < 1:
            raise ConfigError(f"--stream-interval must be at least 1, got {self.stream_interval}")
        if not 0 <= self.stream_ping_interval_s < inf:
            raise ConfigError(f"--stream-ping-interval-s must be at least 0, got {self.stream_ping_interval_s:g}")
        for name in ("default_chat_template_kwargs", "override_generation_config"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise ConfigError(f"{flag(name)} must be a mapping, got {value!r:.100}")
        try:
            check_template_options(self.default_chat_template_kwargs)
        except RequestError as error:
            raise ConfigError(f"{flag('default_chat_template_kwargs')}: {error}") from error
        self.cross_origin()
        self.tls()
        for limit in LIMITS:
            if (value := getattr(self, limit.replace("-", "_"))) is not None:
                check_limit(f"--{limit}", value)
        for name, value, known in (("format", self.log_format, LOG_FORMATS), ("level", self.log_level, LOG_LEVELS)):
            if value not in known:
                raise ConfigError(f"--log-{name} must be one of {', '.join(known)}; got {value!r}")
        if self.cache_page not in CACHE_PAGES:
            raise ConfigError(f"--cache-page must be one of {', '.join(CACHE_PAGES)}; got {self.cache_page!r}")

        _ = self.response_store_bytes

    @property
    def response_store_bytes(self) -> int:
        """Memory for responses; 0: none are stored."""
        return 0 if str(self.response_store).strip() == "0" else parse_bytes(self.response_store, "--response-store")

    def body_limit(self, *, has_pictures: bool) -> int:
        """Return the largest body that is accepted."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return MAX_BODY_BYTES_WITH_PICTURES if has_pictures else MAX_BODY_BYTES

    @property
    def serves_admin(self) -> bool:
        """Whether the administrative endpoints are served: to all that have a key, unless keys separate tenants."""
        has_keys = bool(self.api_key or read_api_key())
        return self.enable_admin_endpoints or (has_keys and not self.salt_per_key)

    def key_salts(self) -> dict[str, str]:
        """Return the valid keys, the environment's included, each with the prefix of its requests' salts.

        Raises:
            ConfigError: ``salt_per_key`` or ``allow_runtime_lora`` is set and there is no key, or the environment's is
                blank.
        """
        key = read_api_key()
        if key is not None:
            _require_texts(API_KEY, [key])
        keys = [*self.api_key, *(each.key for each in self._named_keys()), *([key] if key else [])]
        if self.allow_runtime_lora is not None and not keys:
            raise ConfigError(f"--allow-runtime-lora lets requests name paths; add --api-key or {API_KEY}")
        if self.salt_per_key and not keys:
            raise ConfigError(
                f"--salt-per-key gives each API key a salt, and there is none; add --api-key or {API_KEY}"
            )
        return {key: salt_of_key(key) if self.salt_per_key else "" for key in keys}

    def _named_keys(self) -> Sequence[NamedKey]:
        """Return the keys of the file. Raises as ``read_keys_file``."""
        return [] if self.api_keys_file is None else read_keys_file(self.api_keys_file, self._key_limits)

    @property
    def _key_limits(self) -> KeyLimits:
        return KeyLimits(self.max_requests_per_minute, self.max_tokens_per_minute, self.max_concurrent_requests)

    def tenants(self) -> dict[str, Tenant]:
        """Return the tenants by the digests of their keys; without keys, the only one. Raises as ``key_salts``."""
        keys = [*self.key_salts()]
        if not keys:
            return {"": Tenant("", self._key_limits)}
        named = {each.key: each for each in self._named_keys()}
        tenants = {}
        for key in keys:
            entry = named.get(key, NamedKey("", key, self._key_limits))
            id = owner_digest(key)
            tenants[id] = Tenant(id, entry.limits, name=entry.name, weight=entry.weight, has_peers=len(keys) > 1)
        return tenants

    def cross_origin(self) -> CrossOrigin | None:
        """Return what web pages of other origins may do; None: nothing.

        Raises:
            ConfigError: a value is malformed, or has no effect because no origin is allowed.
        """
        given = CrossOrigin(self.allowed_origins, self.allow_credentials, self.allowed_methods, self.allowed_headers)
        _require_matches("--allowed-origins", given.origins, ORIGIN, "https://app.example, null or *")
        _require_matches("--allowed-methods", given.methods, TOKEN, "POST or *")
        _require_matches("--allowed-headers", given.headers, TOKEN, "Authorization or *")
        if given.origins:
            return given
        if given != CrossOrigin((), with_credentials=False, methods=("*",), headers=("*",)):
            raise ConfigError(
                "--allow-credentials, --allowed-methods and --allowed-headers need --allowed-origins: without it, "
                "pages of other origins may do nothing"
            )
        return None

    def shown(self) -> dict[str, Any]:
        """Return the values of all flags, except the keys."""
        return {name: value for name, value in asdict(self).items() if name != "api_key"}

    def tls(self) -> TlsFiles | None:
        """Return the files for TLS; None: the server speaks plain HTTP.

        Raises:
            ConfigError: flags are missing that others need.
        """
        if self.ssl_cert_reqs not in tuple(ssl.VerifyMode):
            raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs, to check certificates with")
        if self.ssl_certfile is not None:
            return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, self.ssl_cert_reqs)
        if self.ssl_keyfile is not None or self.ssl_ca_certs is not None or self.enable_ssl_refresh:
            raise ConfigError("--ssl-keyfile, --ssl-ca-certs and --enable-ssl-refresh need --ssl-certfile")
        return None

    def allowed_names(self, address: str) -> frozenset[str]:
        """Return the names allowed besides local ones for a server on an address, in the form of ``HostCheck``."""
        if not self.allowed_hosts and not is_local(address):
            return frozenset({"*"})
        return frozenset(name.lower().strip("[]").rstrip(".") for name in (self.host, *self.allowed_hosts))

    def page_mode(self, address: str) -> str:
        """Return the content of the cache page for a server on an address; ``auto`` shows text only to this machine."""
        if self.cache_page != "auto":
            return self.cache_page
        return "local" if is_local(address) else "counts"


def _require_texts(flag: str, values: object) -> None:
    """Raise a ConfigError unless values are a sequence of strings that are not blank. A string is no such sequence."""
    if not isinstance(values, list | tuple) or not all(type(value) is str for value in values):
        raise ConfigError(f"{flag} must be a list of strings, got {type(values).__name__}")
    if not all(value.strip() for value in values):
        raise ConfigError(f"{flag} must not be empty or blank: the shell variable that it comes from may be unset")


def _require_matches(flag: str, values: Sequence[str], pattern: re.Pattern[str], examples: str) -> None:
    """Raise a ConfigError unless values are a list of strings that a pattern matches as a whole."""
    _require_texts(flag, values)
    for value in values:
        if not pattern.fullmatch(value):
            raise ConfigError(f"{flag} must hold values such as {examples}; got {value!r:.200}")


def salt_of_key(key: str) -> str:
    """Return the prefix of the salts of a key's requests: the same on every server, at any time."""
    return blake2s(key.encode(), digest_size=16, person=b"salt").hexdigest() + "/"
